from __future__ import annotations

import pytest

from ppstream.analysis.robot_states import RobotAccount
from ppstream.report.formatting import gib, ms, percent, robot_texts, size_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (gib(-1000), "0.00 GiB"),
        (gib(-(1 << 30)), "-1.00 GiB"),
        (ms(-1000.0), "0.00 ms"),
        (ms(-2_000_000), "-2.00 ms"),
        (percent(-0.0004, 1), "0.0%"),
        (percent(-0.0004, 1, signed=True), "0.0%"),
        (percent(0.0004, 1, signed=True), "0.0%"),
        (percent(0.078, 1, signed=True), "+7.8%"),
        (percent(-0.074, 1, signed=True), "-7.4%"),
    ],
)
def test_what_rounds_to_nothing_has_no_sign(text: str, shown: str) -> None:
    assert text == shown


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (12_340_000, "11.8 MiB"), (2 * 10**15, "1862645.1 GiB")],
)
def test_sizes_are_told_in_their_unit(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("holds", "held_ns", "text"),
    [(3, None, "3 holds"), (0, 0, "0 holds"), (3, 2_000_000, "3 holds for 2.00 ms")],
)
def test_a_robot_that_never_held_has_no_time(holds: int, held_ns: int | None, text: str) -> None:
    assert next(robot_texts(RobotAccount("arm", holds, held_ns, 0, "", None))) == text
