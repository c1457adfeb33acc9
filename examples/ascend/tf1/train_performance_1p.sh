#!/bin/sh
# 500 steps, reported as a measurement of speed.
exec sh "$(dirname "$0")/lenet.sh" perf 500 "$@"
