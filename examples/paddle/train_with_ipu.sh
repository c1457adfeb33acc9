#!/bin/sh
# Paddle's LeNet-5 on MNIST: five epochs of batch 64 at a constant rate. Options of its train.py and of convolve are passed on;
# --use_ipu True computes in the IPU's arithmetic. Leaves below log_dir what the original left there:
#   train.log                  the output of convolve
#   recognize_digits_ipu/      the run, with its best model (there .pdmodel and .pdiparams)
#   learning_curve-ipu.png     loss, accuracy and rate
#   ir/raw_graph.svg           the network as a drawing (there .dot, and .pdf where Graphviz was)
set -eu
run=log_dir/recognize_digits_ipu

rm -rf "$run"
mkdir -p log_dir/ir
echo "training; the log is in log_dir/train.log"
convolve train --config lenet-bn-mnist --lr-schedule constant --log-freq 1 --draw-graph --run-dir "$run" "$@" > log_dir/train.log
cp "$run/curves.png" log_dir/learning_curve-ipu.png
cp "$run/model.svg" log_dir/ir/raw_graph.svg

# The log lines of the original: the cost of every 100th batch of each epoch. Epochs and batches count from 0 there, and a validation
# cost holds from the epoch after it.
awk -F , -v every="${LOG_EVERY:-100}" '
    FILENAME ~ /validation/ {
        if (FNR > 1) {
            cost[int($3 + 0.5)] = $4
            if (best == "" || $4 < lowest) { best = int($3 + 0.5); lowest = $4; accuracy = $5 }
        }
        next
    }
    FNR > 1 {
        pass = int($2 - 0.000001)
        if (FNR == 2 || pass != before) { first = $1; before = pass }
        if (($1 - first) % every) next
        printf "Epoch %d, batch %d, Cost %f", pass, $1 - first, $5
        if (pass in cost) printf ", Validation Cost %f", cost[pass]
        printf "\n"
    }
    END {
        if (best != "") {
            print "Best pass is " best ", validation average loss is " lowest
            printf "The classification accuracy is %.2f%%\n", 100 * accuracy
        }
    }
' "$run/validation.csv" "$run/training.csv"
