"""Real runs whose stages only seem to run beside each other, and reports that must not believe."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill.contention import CONTENTION
from drill.fault_drill import drill
from ranks import Ranks

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.verdict import Verdict
from ppstream.report.cli import main

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize("name", [launch.name for launch in CONTENTION])
def test_nobody_is_told_that_this_run_is_fine(name: str, tmp_path: Path) -> None:
    (outcome,) = drill([name], tmp_path, lambda _: None)
    assert outcome.missed == ""


def test_speed_that_is_accepted_serves_and_ends_with_the_code_of_its_end(tmp_path: Path) -> None:
    slow = ("pipeline.d_in=1", "simulate.a_ms=10", "simulate.c_ms=0", "policy.options.b_ms=12")
    accept = "bringup.accept=['LOW_OVERLAP', 'CONTENDED']"
    with Ranks(tmp_path, *slow, "bringup.envelopes=100", accept) as ranks:
        assert ranks.wait(60) == [0, 0], ranks.output()
        (verdict,) = [line for line in ranks.lines(0) if line.get("name") == "verdict"]
    assert verdict["verdict"] == "FAIL"
    assert "LOW_OVERLAP" in verdict["accepted"]
    assert verdict["accepted"] == verdict["reasons"]
    assert "SERVING, overlap refused: LOW_OVERLAP" in ranks.output()
    assert main([str(ranks.directory)]) == 0
    report = judge(read_run(ranks.directory))
    assert report.verdict is Verdict.FAIL
    assert report.accepted == verdict["accepted"]
