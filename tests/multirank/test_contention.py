"""Real runs whose stages only seem to run beside each other, and reports that must not believe.

Contention for the CPUs, a lock or the interpreter is injected in ``tests/gate``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drill.contention import forge
from ranks import SERIAL, Ranks

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.verdict import Verdict
from ppstream.report.cli import main

pytestmark = pytest.mark.multirank


def test_serial_depth_is_refused_with_30_also_when_its_log_is_forged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ranks(tmp_path, *SERIAL, judged=True) as ranks:
        assert ranks.wait(60) == [30, 30], ranks.output()
        assert re.search(r"exit 30 GATE_FAIL .*LOW_OVERLAP", ranks.output())
    forge(ranks.directory)
    assert main([str(ranks.directory)]) != 0
    said = " ".join(capsys.readouterr().out.split())
    assert "CONTRADICTED: " in said
    assert "verdict was FAIL LOW_OVERLAP" in said


def test_speed_that_is_accepted_serves_and_ends_with_the_code_of_its_end(tmp_path: Path) -> None:
    accept = "bringup.accept=['LOW_OVERLAP', 'CONTENDED']"
    enough = "bringup.envelopes=200", "bringup.standalone=30"
    with Ranks(tmp_path, *SERIAL, accept, *enough) as ranks:
        assert ranks.wait(60) == [0, 0], ranks.output()
        (verdict,) = [line for line in ranks.lines(0) if line.get("name") == "verdict"]
    assert verdict["verdict"] == "FAIL"
    assert "LOW_OVERLAP" in verdict["accepted"]
    assert verdict["accepted"] == verdict["reasons"]
    assert "ppstream: bring-up FAIL, accepted: Its ranks work too little" in ranks.output()
    assert main([str(ranks.directory)]) == 0
    report = judge(read_run(ranks.directory))
    assert report.verdict is Verdict.FAIL
    assert report.accepted == verdict["accepted"]
