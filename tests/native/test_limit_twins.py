from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_rows import in_python

from ppstream import native
from ppstream.config.schema import ActionConfig
from ppstream.pipeline.action_limits import ActionRules

HORIZON, DIM = 3, 2
LOW, HIGH = (-1.0, -0.25), (1.0, 0.5)
near = st.sampled_from(
    [
        float(np.nextafter(np.float32(limit), np.float32(to)))
        for limit in (*LOW, *HIGH)
        for to in (-9, 9)
    ]
)
actions = st.lists(
    st.floats(-0.25, 0.5, width=32)
    | st.sampled_from([*LOW, *HIGH, 0.0, -0.0, np.nan, np.inf, -np.inf])
    | near,
    min_size=HORIZON * DIM,
    max_size=HORIZON * DIM,
)


def twins(**more: Any) -> list[ActionRules]:
    names = ("x", "y")
    made = ActionConfig(
        names=names, horizon=HORIZON, dt_ms=10.0, low=LOW, high=HIGH, lease_ms=100.0, **more
    )
    with in_python():
        python = ActionRules(made)
    return [ActionRules(made), python]


@settings(max_examples=200, deadline=None)
@given(actions, st.sampled_from(["clip", "drop"]), st.booleans())
def test_both_find_the_same_and_leave_the_same(
    sent: list[float], on_limit: str, has_rates: bool
) -> None:
    rates = {"velocity": (90.0, 90.0)} if has_rates else {}
    chunks = [np.array(sent, np.float32).reshape(HORIZON, DIM) for _ in range(2)]
    found = [
        rules.enforce(chunk)
        for rules, chunk in zip(twins(on_limit=on_limit, **rates), chunks, strict=True)
    ]
    assert found[0] == found[1]
    assert chunks[0].tobytes() == chunks[1].tobytes()


def test_the_core_finds_usual_actions_inside() -> None:
    low, high = np.float32([[-1, 0]]), np.float32([[1, 2]])
    assert native.are_inside(np.float32([[1, 0]]), low, high)
    assert not native.are_inside(np.float32([[1, np.nan]]), low, high)
    assert not native.are_inside(np.float32([[np.nextafter(np.float32(1), 2), 0]]), low, high)


@pytest.mark.parametrize(
    "unusual",
    [np.zeros((1, 2)), np.zeros((1, 3), np.float32), np.zeros((1, 4), np.float32)[:, ::2]],
)
def test_what_is_no_plain_chunk_is_left_to_python(unusual: Any) -> None:
    limits = np.full((1, 2), 9, np.float32)
    assert not native.are_inside(unusual, -limits, limits)
