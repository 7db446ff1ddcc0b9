import math
from typing import Any

import pytest
from drill.judging import FaultOutcome, judge_robot
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
