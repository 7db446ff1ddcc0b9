import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools/nsys_profile.sh"

#: Stands in for the profiler: writes down how it was called, and leaves a report behind.
NSYS = """#!/bin/sh
echo "$*" >> "$CALLS"
if [ "$1" = profile ]; then
    out=$(echo "$*" | sed 's/.*--output=\\([^ ]*\\).*/\\1/' | sed "s/%q{RANK}/$RANK/")
    : > "$out.nsys-rep"
fi
"""

#: Stands in for torchrun, which is slow: the command behind its options, once for each rank.
PYTHON = """#!/bin/sh
[ "$1 $2 $3 $4" = "-m torch.distributed.run --no-python --nproc-per-node=2" ] || exit 9
shift 4
for rank in 0 1; do RANK=$rank "$@"; done
"""


def run(folder: Path, *arguments: str, nsys: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = os.environ | {"NSYS": nsys, "CALLS": str(folder / "calls"), "PATH": path}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def test_each_rank_is_profiled_and_exported_anew(tmp_path: Path) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text(NSYS)
    nsys.chmod(0o755)
    done = run(tmp_path, str(tmp_path / "out"), "--config", "a.toml", nsys=str(nsys))
    assert done.returncode == 0, done.stderr
    profiles, exports = [], []
    for call in (tmp_path / "calls").read_text().splitlines():
        (profiles if call.startswith("profile") else exports).append(call)
    assert len(profiles) == len(exports) == 2
    for call in profiles:
        assert "--trace=cuda,nvtx,osrt" in call
        assert "--delay=30 --duration=5 --kill=none" in call  # the gate is not disturbed
        assert call.endswith("python -m ppstream.serve --config a.toml")
    assert all("--type=sqlite --force-overwrite=true" in call for call in exports)
    assert done.stdout.splitlines()[-1].endswith("/rank1.sqlite")


def test_without_nsys_it_says_where_it_comes_from(tmp_path: Path) -> None:
    done = run(tmp_path, str(tmp_path / "out"), nsys="no-such-profiler")
    assert done.returncode == 3
    assert "CUDA toolkit" in done.stderr
    assert run(tmp_path, nsys="no-such-profiler").returncode == 2
