#!/bin/sh
# Paddle's LeNet-5 on MNIST: five epochs of batch 64 at a constant rate. Options of its train.py and of convolve are passed on;
# --use_ipu True computes in the IPU's arithmetic. Leaves below log_dir what the original left there:
#   recognize_digits_ipu/      the run, with its best model (there .pdmodel and .pdiparams)
#   learning_curve-ipu.png     loss, accuracy and rate
#   ir/raw_graph.svg           the network as a drawing (there .dot, and .pdf where Graphviz was)
set -eu
run=log_dir/recognize_digits_ipu

rm -rf "$run"
mkdir -p log_dir/ir
convolve train --config lenet-bn-mnist --lr-schedule constant --log-freq 100 --draw-graph --run-dir "$run" "$@"
cp "$run/curves.png" log_dir/learning_curve-ipu.png
cp "$run/model.svg" log_dir/ir/raw_graph.svg

# The log lines of the original. Epochs and batches count from 0 there; a validation cost holds from the epoch after it.
awk -F , '
    FILENAME ~ /validation/ {
        if (FNR > 1) {
            cost[int($3 + 0.5)] = $4
            if (best == "" || $4 < lowest) { best = int($3 + 0.5); lowest = $4; accuracy = $5 }
        }
        next
    }
    FNR > 1 {
        pass = int($2 - 0.000001)
        batch = int($1 - pass * $1 / $2 + 0.5)
        printf "Epoch %d, batch %d, Cost %f", pass, batch, $5
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
