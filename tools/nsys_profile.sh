#!/bin/sh
# One Nsight Systems report per rank of a run, exported for tools/kernel_report.py.
#
#   tools/nsys_profile.sh OUT [serve arguments...]      e.g. --config my-arm.toml
#
# DELAY and DURATION (s) choose the stretch: after bring-up, so that the gate is not disturbed.
# TRACE adds what is traced; NSYS and RANKS name the profiler and the number of ranks.
set -eu

if [ $# -lt 1 ] || [ "$1" = "--help" ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi
out=$1
shift
nsys=${NSYS:-nsys}
if ! command -v "$nsys" > /dev/null; then
    echo "nsys_profile: $nsys is not there; it comes with the CUDA toolkit, or set NSYS" >&2
    exit 3
fi
mkdir -p "$out"

# --no-python: each rank is a profiler that starts a Python, not a Python
python -m torch.distributed.run --no-python --nproc-per-node="${RANKS:-2}" \
    "$nsys" profile \
    --trace="${TRACE:-cuda,nvtx,osrt}" \
    --delay="${DELAY:-30}" --duration="${DURATION:-5}" --kill=none \
    --output="$out/rank%q{RANK}" --force-overwrite=true \
    python -m ppstream.serve "$@"

for report in "$out"/rank*.nsys-rep; do
    # an export that is older than its report shows an earlier run: always write it anew
    "$nsys" export --type=sqlite --force-overwrite=true \
        --output="${report%.nsys-rep}.sqlite" "$report"
done
echo "python tools/kernel_report.py $out/rank0.sqlite"
echo "python tools/kernel_report.py $out/rank1.sqlite"
