"""Real runs that only seem to overlap: none may pass.

Those that work have the machine for themselves, ``make check-gate``; of those that sleep two run
beside each other.
"""

from __future__ import annotations

import sys

import pytest
import real_runs
from drill import fault_drill, torchrun
from forked_process import FORKING

WORKING = ("one-cpu", "lock-beside-others", "one-cpu-of-two", "slower-alone", "one-interpreter")
SLEEPING = [
    pytest.param(fault, marks=pytest.mark.alone) for fault in ("shared-lock", "worse-service")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [*WORKING, *SLEEPING])
def test_gate_and_report_refuse_what_only_seems_to_overlap(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for starting in (real_runs, torchrun):  # without the seconds that torch's import takes
        monkeypatch.setattr(starting, "subprocess", FORKING)
    monkeypatch.setattr(sys, "argv", ["drill/fault_drill.py", "--only", fault])
    ended = fault_drill.main()
    said = capsys.readouterr().out
    assert ended == 0, said
    assert said.endswith("1 of 1 faults kept their bounds\n")
