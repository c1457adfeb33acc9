# shellcheck shell=sh
# What the training scripts of Ascend's model zoo share: their arguments, and the files that they leave behind.
#
# A script sets network, calls read_arguments "$@", train and name_case, then writes its report.
# Everything lies in output/<device> below the current folder; device is $ASCEND_DEVICE_ID, or 0.

device=${ASCEND_DEVICE_ID:-0}
folder=output/$device
run=$folder/run
log=$folder/train_$device.log

# read_arguments ARGUMENT...: find --data_path, which is required, and precision_mode; the others go to convolve as they are.
read_arguments() {
    data_path=
    precision_mode=allow_mix_precision
    extra=
    for argument; do
        case $argument in
        -h | --help) usage && exit 0 ;;
        --data_path=*) data_path=${argument#*=} ;;
        --precision_mode=*) precision_mode=${argument#*=} ;;
        *) extra="$extra $(quote "$argument")" ;;
        esac
    done
    if [ -z "$data_path" ]; then
        echo "[Error] para \"data_path\" must be configured: $0 --data_path=FOLDER" >&2
        exit 1
    fi
}

usage() {
    echo "usage: $0 --data_path=FOLDER [--precision_mode=MODE] [any option of convolve train]"
    echo "modes: allow_fp32_to_fp16 force_fp16 must_keep_origin_dtype allow_mix_precision (default)"
}

# A word as the shell reads it back, whatever is in it.
quote() {
    printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")"
}

# train OPTION...: run convolve with these options and those of the caller; end with its exit code if it fails.
train() {
    rm -rf "$folder"
    mkdir -p "$folder"
    eval "set -- \"\$@\" $extra"
    code=0
    convolve train "$@" --data-dir "$data_path" --precision-mode "$precision_mode" --run-dir "$run" \
        >"$log" 2>&1 || code=$?
    if [ "$code" -ne 0 ]; then
        tail -n 5 "$log" >&2
        echo "$0: training failed (exit code $code), so there is no report; $log has all of it" >&2
        exit "$code"
    fi
}

# figure KEY: one number of the run's summary.json.
figure() {
    sed -n "s/^  \"$1\": \([^,]*\),\{0,1\}\$/\1/p" "$run/summary.json"
}

# calculate EXPRESSION DECIMALS: arithmetic with a fixed number of decimals.
calculate() {
    awk "BEGIN { printf \"%.$2f\", $1 }"
}

# log_points FORMAT COLUMNS: the run's log points as lines, where COLUMNS are fields of training.csv (an awk expression).
log_points() {
    awk -F , "NR > 1 { printf \"$1\\n\", $2 }" "$run/training.csv"
}

# name_case KIND: the name of a case as the zoo writes it; KIND is acc or perf.
name_case() {
    batch_size=$(figure batch_size)
    case_name=${network:?}_bs${batch_size}_1p_$1
}

# report KEY=VALUE...: what every model of the zoo writes, as `Key = value` lines, then the lines given.
report() {
    {
        echo "Network = $network"
        echo "RankSize = 1"
        echo "BatchSize = $batch_size"
        echo "DeviceType = $(uname -m)"
        for line; do
            echo "${line%%=*} = ${line#*=}"
        done
    } >"$folder/$case_name.log"
}
