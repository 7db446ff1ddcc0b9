import math
import sys
from typing import Any

import pytest
from drill import fault_drill
from drill.judging import FaultOutcome, judge_robot, merged, print_outcome
from drill.scene import Tick


@pytest.mark.parametrize(
    ("ticks", "missed"),
    [
        ([Tick(1, moved=True, age_ms=30, true_ms=30.1), Tick(2, moved=False)], ""),
        ([Tick(1, moved=True, age_ms=301, true_ms=301)], "an action of age 301 ms was executed"),
        ([Tick(1, moved=True, age_ms=70, true_ms=171)], "one of 70 ms from samples of 171 ms"),
        ([Tick(1, moved=True, age_ms=70, true_ms=math.inf)], "from samples of inf ms"),
    ],
)
def test_an_action_is_as_old_as_the_samples_it_was_computed_from(ticks: Any, missed: str) -> None:
    class Scene:
        def ticks(self, since_ns: int) -> Any:
            return ticks

    outcome = FaultOutcome("x", "", "", "")
    judge_robot(Scene(), outcome, 0, must_hold=False)  # type: ignore[arg-type]
    assert missed in outcome.missed
    assert bool(missed) == bool(outcome.missed)


def test_rows_of_a_page_s_table_are_replaced_and_new_ones_added() -> None:
    def row(name: str, gone_s: float) -> FaultOutcome:
        return FaultOutcome(name, "", "", "", gone_s=gone_s, ledger="balances")

    alone = merged("", [row("a", 1), row("b", 2)])

    def page(rows: str) -> str:
        return f"# Title\n\n{rows}\nWhat `a` is.\n"

    expected = merged("", [row("a", 4), row("b", 2), row("c", 3)])
    assert merged(page(alone), [row("c", 3), row("a", 4)]) == page(expected)


def test_a_name_of_any_length_stays_a_word_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [fault.name for fault in fault_drill.GPU.faults]
    assert max(map(len, names)) > 30
    monkeypatch.setattr(sys, "argv", ["fault_drill.py", "--gpu", "--list"])
    assert fault_drill.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    print_outcome(FaultOutcome(max(names, key=len), "", "", "", notice_s=0.5))
    assert f"{max(names, key=len)} noticed 0.50 s" in capsys.readouterr().out
