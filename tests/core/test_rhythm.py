from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppstream.core.clock import NS_PER_MS
from ppstream.core.rhythm import AHEAD_NS, LONGEST_NS, NEAR_NS, ODD_MAX, SHORTEST_NS, Rhythm

STEP = 20 * NS_PER_MS
BEGIN = 10**12
SETTLED = ODD_MAX + 3  # envelopes until a rhythm is known


def noted(*at_ns: int) -> Rhythm:
    rhythm = Rhythm()
    for at in at_ns:
        rhythm.note(at)
    return rhythm


def evenly(count: int, step: int = STEP) -> list[int]:
    return [BEGIN + index * step for index in range(count)]


@given(
    st.integers(SHORTEST_NS + NEAR_NS, LONGEST_NS - NEAR_NS),
    st.lists(st.integers(0, NEAR_NS // 4), min_size=SETTLED, max_size=60),
)
def test_of_even_envelopes_the_next_is_expected_about_when_it_comes(
    step: int, late: list[int]
) -> None:
    rhythm = Rhythm()
    for index, late_ns in enumerate(late):
        at_ns = BEGIN + index * step + late_ns
        expected_ns = rhythm.next_ns
        if index >= SETTLED:
            assert expected_ns is not None
            assert abs(at_ns - expected_ns) < NEAR_NS
        rhythm.note(at_ns)


def test_of_the_first_ones_nothing_is_known() -> None:
    assert Rhythm().next_ns is None
    assert noted(BEGIN).next_ns is None
    assert noted(BEGIN, BEGIN + STEP).next_ns is None


def test_one_that_is_late_moves_nothing_once_the_next_came() -> None:
    rhythm = noted(*evenly(SETTLED))
    rhythm.note(BEGIN + SETTLED * STEP + 5 * NS_PER_MS)
    assert rhythm.next_ns is None
    rhythm.note(BEGIN + (SETTLED + 1) * STEP)
    assert rhythm.next_ns == BEGIN + (SETTLED + 2) * STEP


def test_another_rate_is_followed() -> None:
    end = evenly(SETTLED)[-1]
    rhythm = noted(*evenly(SETTLED), *(end + index * 2 * STEP for index in range(1, SETTLED + 2)))
    expected_ns = rhythm.next_ns
    assert expected_ns is not None
    assert abs(expected_ns - (end + (SETTLED + 2) * 2 * STEP)) < NEAR_NS


@pytest.mark.parametrize("step", [SHORTEST_NS // 2, 2 * LONGEST_NS])
def test_too_many_and_too_few_have_none(step: int) -> None:
    assert noted(*evenly(2 * SETTLED, step)).next_ns is None


def test_who_gets_ready_does_so_before_each_and_for_one_that_stays_away() -> None:
    rhythm = noted(*evenly(SETTLED))
    due_ns = BEGIN + SETTLED * STEP - AHEAD_NS
    assert rhythm.ready_ns(due_ns - STEP // 2) == rhythm.ready_ns(due_ns) == due_ns
    assert rhythm.ready_ns(due_ns + 1) == due_ns + STEP
    assert rhythm.ready_ns(due_ns + STEP + 1) is None
    assert Rhythm().ready_ns(0) is None
