#!/bin/sh
# What a handwritten digit is, by the model that train_with_ipu.sh left in log_dir. The picture is infer_3.png, or --img FILE.
set -eu
[ $# -gt 0 ] || set -- --img infer_3.png
answers=$(convolve predict --save_dir log_dir/recognize_digits_ipu --json "$@")
echo "$answers" | sed -n 's/.*"label": "\([^"]*\)".*/digit hand write number picture is recognized as : \1/p'
