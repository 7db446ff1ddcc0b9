"""Benchmarks start, and those that need seconds run once with tiny numbers that prove nothing.

Each prints its claims and whether they follow from its numbers; whoever runs one sees it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import claims_audit
import pytest
from claimed_numbers import ratio, write_audited
from forked_process import run_forked

TOOLS: Final = Path(__file__).resolve().parents[2] / "tools"
LIMIT_S: Final = 100
#: Options of a run that takes a moment. The others need real ranks, GPUs or more seconds.
TINY: Final = {
    "dataset.py": ("--rounds", "1", "--parts", "device", "pinned", "safetensors", "mcap", "loop"),
    "log_cost.py": ("--batches", "3", "--blocks", "2", "--block", "20"),
    "metrics_cost.py": ("--blocks", "2", "--block", "20"),
    "record_cost.py": ("--seconds", "0.1"),
    "resample.py": ("--calls", "30"),
}
COMMANDS: Final = sorted(
    path.name for path in (TOOLS / "bench").glob("*.py") if '"--json"' in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_starts(name: str) -> None:
    done = run_forked([str(TOOLS / "bench" / name), "--help"], LIMIT_S)
    assert (done.returncode, "--json" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_s_claims_follow_from_its_numbers(name: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [str(TOOLS / "bench" / name), *TINY[name], "--json", str(file)]
    done = run_forked(command, LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert claims_audit.main([str(file), "--quiet"]) == 0


def test_a_claim_that_does_not_follow_is_said_aloud_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    claims = [ratio("right", 6.0, 3.0, 2.0), ratio("wrong", 6.0, 3.0, 1.5)]
    write_audited(file, {"rows": [1]}, claims)
    said = capsys.readouterr().out
    assert "claims: 1 of 2 follow" in said
    assert "BROKEN" in said
    assert json.loads(file.read_text())["rows"] == [1]
    assert claims_audit.main([str(file), "--quiet"]) == 1
