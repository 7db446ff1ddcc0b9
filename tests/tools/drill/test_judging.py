import math
from typing import Any

import pytest
from drill.judging import Outcome, judge_robot, table
from drill.mutants import MUTANTS, ROOT, Mutant
from drill.scene import Tick


def test_the_table_has_a_row_for_each_fault_and_says_which_missed():
    killed = Outcome("kill", "F20", "SIGKILL", "codes", notice_s=0.126, codes=(20, -9))
    killed.ledger, killed.oldest_ms, killed.true_ms = "balances", 61.4, 61.6
    late = Outcome("late", "F21", "SIGSTOP", "codes", missed="gone after 9 s\nand more")
    assert table([killed, late]).splitlines() == [
        "| fault | noticed s | gone s | safe s | moves s | oldest ms | truly ms | codes | ledger |",
        "|---|---|---|---|---|---|---|---|---|",
        "| `kill` | 0.13 |  |  |  | 61 | 62 | 20, -9 | balances |",
        "| `late` |  |  |  |  |  |  |  | MISSED: gone after 9 s |",
    ]


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

    outcome = Outcome("x", "", "", "")
    judge_robot(Scene(), outcome, 0, must_hold=False)  # type: ignore[arg-type]
    assert missed in outcome.missed
    assert bool(missed) == bool(outcome.missed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_every_mutant_still_finds_the_line_it_changes(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
