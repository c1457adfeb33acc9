# shellcheck shell=sh
# mnist.sh KIND SUFFIX EPOCHS ARGUMENT...: the body of this folder's scripts. KIND is acc or perf; SUFFIX ends the case name.
set -eu
# shellcheck source-path=SCRIPTDIR source=../model_zoo.sh
. "$(dirname "$0")/../model_zoo.sh"

network=MNIST_ID2481_for_TensorFlow2.X
kind=$1
suffix=$2
epochs=$3
shift 3

read_arguments "$@"
train --config cnn-wide-mnist --epochs "$epochs" --log-freq 1
name_case "$kind"

# shellcheck disable=SC2016  # awk's own variables
log_points 'step:%d ,loss: %f ,time:%f' '$1, $5, $8 / 1000' >>"$log"
sed -n 's/^step:.* ,loss: \([^ ]*\) ,.*/\1/p' "$log" >"$folder/train_${case_name}_loss.txt"
speed=$(calculate "$(figure images_per_second)" 2)
accuracy=$(calculate "$(figure test_accuracy)" 4)
seconds=$(calculate "$(figure end_to_end_seconds)" 0)
echo "imgs/s: $speed" >>"$log"

report "CaseName=$case_name$suffix" "ActualFPS=$speed" "TrainingTime=$(calculate "$(figure ms_per_step) / 1000" 6)" \
    "TrainAccuracy=$accuracy" "ActualLoss=$(figure final_loss)" "E2ETrainingTime=$seconds" \
    "TrainingTimeUnit=s/step" "TrainAccuracyImages=$(figure test_samples) test images"

echo "Final Training Duration sec : $seconds"
echo "------------------ Final result ------------------"
echo "Final Performance images/sec : $speed"
echo "Final Train Accuracy : $accuracy"
