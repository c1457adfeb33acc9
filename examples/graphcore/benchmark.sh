#!/bin/sh
# The commands of Graphcore's PyTorch benchmark README: benchmark.sh resnet50|efficientnet-b4 m2000|pod16 [options of convolve
# train]. Without --imagenet-data-path or --data-dir images are generated. The first reported speed is left out of the mean.
set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 resnet50|efficientnet-b4 m2000|pod16 [options of convolve train]" >&2
    exit 2
fi
config=$1-benchmark-$2
shift 2
data=--generated-data
case " $* " in *-data-path* | *--data-dir* | *--data_dir* | *--dataset*) data=--no-generated-data ;; esac

run=logs/$config-$$
convolve train --config "$config" "$data" --run-dir "$run" "$@"
sed -n 's/^  "images_per_second": \([^,]*\),$/throughput: \1 img\/sec/p' "$run/summary.json"
