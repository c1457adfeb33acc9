#!/bin/sh
# MLPerf's ResNet-50 as Graphcore timed it: run_and_time.sh REPLICAS SEED [HOST0 PARTITION SERVER NETMASK] [--upload] [options].
# REPLICAS is 16, 64 or 128. The four words about the site named parts of an IPU system and are not needed here; --upload
# sends metrics to Weights & Biases. Trains, validates every checkpoint, and prints the seconds for both in a RESULT line.
set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 REPLICAS SEED [HOST0 PARTITION SERVER NETMASK] [--upload] [options of convolve train]" >&2
    exit 2
fi
replicas=$1
seed=$2
shift 2
case $replicas in
16) config=mk2_resnet50_mlperf_pod16_bs20 ;;
64 | 128) config=mk2_resnet50_mlperf_pod${replicas}_bs20 ;;
*) echo "$0: REPLICAS is 16, 64 or 128, not $replicas" >&2 && exit 2 ;;
esac
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do
    shift
done
upload=--no-wandb
if [ "${1-}" = --upload ]; then
    upload=--wandb
    shift
fi

run=logs/$config-$seed-$$
began=$(date +%s)
convolve train --config "$config" --seed "$seed" --no-validation "$upload" --run-dir "$run" "$@"
convolve validate "$run" --all
echo "RESULT,RESNET50,$seed,$(($(date +%s) - began)),convolve,$(date -u -d "@$began" '+%Y-%m-%d %H:%M:%S' 2>/dev/null || echo "$began")"
