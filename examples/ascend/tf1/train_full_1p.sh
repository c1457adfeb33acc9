#!/bin/sh
# Ascend's LeNet for TensorFlow 1, trained to the end: five times 1,000 steps, test accuracy in the report.
exec sh "$(dirname "$0")/lenet.sh" acc 5000 "$@"
