# shellcheck shell=sh
# lenet.sh KIND STEPS ARGUMENT...: the body of this folder's scripts. KIND is acc or perf.
set -eu
# shellcheck source-path=SCRIPTDIR source=../model_zoo.sh
. "$(dirname "$0")/../model_zoo.sh"

network=LeNet_ID0127_for_TensorFlow
kind=$1
steps=$2
shift 2

read_arguments "$@"
rm -f output/performance_precision.txt
train --config lenet-sigmoid-mnist --iterations "$steps" --log-freq 10
name_case "$kind"

# shellcheck disable=SC2016  # awk's own variables
log_points 'epoch : %d----step : %d----loss : %f----sec/step : %f' 'int($2), $1, $5, $8 / 1000' >>"$log"
sed -n 's/.*----loss : \(.*\)----.*/\1/p' "$log" >"$folder/train_${case_name}_loss.txt"
milliseconds=$(figure ms_per_step)
accuracy=$(calculate "$(figure test_accuracy)" 4)
seconds=$(figure end_to_end_seconds)

{
    printf 'Final Accuracy accuracy : %s\r\n' "$accuracy"
    printf 'Final Performance ms/step : %.4f\r\n' "$milliseconds"
    printf 'Final Training Duration sec : %.4f\r\n' "$seconds"
} | tee output/performance_precision.txt >>"$log"

# The original names the accuracy differently in its two reports.
name=TrainAccuracy
[ "$kind" = acc ] || name=Accuracy
speed=$(calculate "$(figure images_per_second)" 2)
whole=$(calculate "$seconds" 0)
report "CaseName=$case_name" "ActualFPS=$speed" "TrainingTime=$(calculate "$milliseconds" 2)" \
    "ActualLoss=$(figure final_loss)" "$name=$accuracy" "E2ETrainingTime=$whole" \
    "TrainingTimeUnit=ms/step" "${name}Images=$(figure test_samples) test images"

echo "Final Performance images/sec : $speed"
echo "Final Train Accuracy : $accuracy"
echo "E2E Training Duration sec : $whole"
