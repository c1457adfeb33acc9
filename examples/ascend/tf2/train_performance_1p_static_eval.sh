#!/bin/sh
# The same work as train_full_1p.sh, reported as a measurement of speed. Shapes are always known here, hence "static".
exec sh "$(dirname "$0")/mnist.sh" perf _static 10 "$@"
