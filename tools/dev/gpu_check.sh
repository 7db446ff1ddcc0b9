#!/bin/sh
# Builds, checks and measures everything that needs a GPU; stops at the first thing that fails.
#
#     tools/dev/gpu_check.sh [RESULTS_FOLDER] [--quick]
#
# Needs python3 with torch, cuda-core, msgspec, pyzmq, nvtx, pytest, hypothesis and Triton, and
# compute-sanitizer; with ncu, NVTX ranges are checked too. Tests of two GPUs skip on one.
set -eu
cd "$(dirname "$0")/../.."
results=${1:-.}
quick=${2:-}
PYTHONPATH=kernels:stages:tools:.${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH PYTHONUNBUFFERED=1

echo '== machine'
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
python3 -c 'import torch, cuda.core as c; print("torch", torch.__version__, "cuda-core", c.__version__)'

echo '== tests'
python3 -m pytest -q -m gpu -p no:cacheprovider tests/kernels tests/gpu
python3 -m pytest -q -p no:cacheprovider tests/kernels/test_cuda_compile.py

echo '== sanitizer'
for tool in memcheck racecheck; do
    # cuda-bindings probes the driver for functions that it may lack: no errors of ours
    compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
        python3 tools/dev/gpu_once.py resample
    compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
        python3 tools/dev/gpu_once.py window
    compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
        python3 tools/dev/gpu_once.py put
done

if command -v ncu >/dev/null; then
    echo '== NVTX: 6 windows of 5 kernels in the range A, nothing outside of it'
    ncu --clock-control none --nvtx --nvtx-include 'ppstream@A/' \
        --metrics gpu__time_duration.sum python3 tools/dev/gpu_once.py window >"$results/ncu.txt"
    test "$(grep -c 'REGISTERED: A' "$results/ncu.txt")" = 30
fi

echo '== measured'
# shellcheck disable=SC2086
python3 tools/bench/resample.py --device cuda $quick --json "$results/resample.json"
# shellcheck disable=SC2086
python3 tools/bench/device_window.py $quick --json "$results/device_window.json"
# shellcheck disable=SC2086
python3 tools/bench/workload.py $quick --json "$results/workload.json"
