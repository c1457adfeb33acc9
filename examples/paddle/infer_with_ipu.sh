#!/bin/sh
# What a handwritten digit is, by the model that train_with_ipu.sh left in log_dir. The image is --img FILE; by default infer_3.png in
# the current folder, or the sample of this repository if there is none.
set -eu
if [ $# -eq 0 ]; then
    sample=infer_3.png
    [ -f "$sample" ] || sample=$(dirname "$0")/../digits/3.png
    set -- --img "$sample"
fi
answers=$(convolve predict --save_dir log_dir/recognize_digits_ipu --json "$@")
echo "$answers" | sed -n 's/.*"label": "\([^"]*\)".*/digit hand write number picture is recognized as : \1/p'
