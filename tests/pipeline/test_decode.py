from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppstream.config.schema import ActionConfig, RobotLimits
from ppstream.core.errors import ConfigError
from ppstream.pipeline.action_limits import ActionRules, Enforced
from ppstream.pipeline.decode import build

ACTIONS = ActionConfig(
    names=("a", "b"), horizon=3, dt_ms=10, low=(-1.0, -2.0), high=(1.0, 2.0), lease_ms=100
)


def rules(robot: RobotLimits | None = None, **changes: Any) -> ActionRules:
    return ActionRules(msgspec.structs.replace(ACTIONS, **changes), robot)


def test_the_default_decoder_copies_the_actions_of_the_row() -> None:
    wanted = np.arange(6, dtype=np.float32).reshape(3, 2)
    actions = np.zeros((3, 2), np.float32)
    build({}, ACTIONS)(0, {"actions": wanted, "other": wanted * 2}, actions)
    assert np.array_equal(actions, wanted)
    assert not np.shares_memory(actions, wanted)


def test_the_default_decoder_un_normalises_each_action_by_its_own_numbers() -> None:
    actions = np.zeros((1, 2), np.float32)
    decoder = build({"offset": [0.5, -1], "scale": [2, 10]}, ACTIONS)
    decoder(0, {"actions": np.float32([[1, 0.25]])}, actions)
    assert np.array_equal(actions, np.float32([[2.5, 1.5]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gain": 2}, "gain: the default decoder knows offset and scale only"),
        ({"scale": [1]}, r"scale: got \[1\], want 2 finite numbers"),
        ({"offset": [1, float("nan")]}, "offset: got .* want 2 finite numbers"),
        ({"offset": "mean"}, "offset: got 'mean', want 2 finite numbers"),
    ],
)
def test_the_default_decoder_refuses_options_it_cannot_use(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(options, ACTIONS)


def test_values_are_clipped_into_the_limits_of_their_action_and_counted() -> None:
    actions = np.float32([[0.5, 1.5], [1.5, 3.0], [-1.0, -2.5]])
    assert rules().enforce(actions) == Enforced(3, None)
    assert np.array_equal(actions, np.float32([[0.5, 1.5], [1.0, 2.0], [-1.0, -2.0]]))


def test_actions_on_the_limit_are_left_alone() -> None:
    actions = np.float32([[1.0, -2.0]])
    assert rules().enforce(actions) == Enforced(0, None)


def test_where_limits_drop_a_value_outside_is_a_violation() -> None:
    assert rules(on_limit="drop").enforce(np.float32([[0.5, 2.1]])) == Enforced(0, "limit")
    assert rules(on_limit="drop").enforce(np.float32([[0.5, 2.0]])) == Enforced(0, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_never_becomes_a_usable_one(bad: float) -> None:
    actions = np.float32([[bad, 5.0]])
    assert rules().enforce(actions).violation == "non_finite"
    assert not np.isfinite(actions[0, 0])


@pytest.mark.parametrize(
    ("step", "violation"), [(0.1, None), (-0.1, None), (0.1001, "velocity"), (-0.11, "velocity")]
)
def test_a_step_faster_than_its_velocity_is_a_violation(step: float, violation: str) -> None:
    actions = np.float32([[0, 0], [step, 1.9], [step, 1.9]])  # steps of 10 ms
    assert rules(velocity=(10.0, np.inf)).enforce(actions).violation == violation


@pytest.mark.parametrize(("bend", "violation"), [(0.1, None), (0.11, "acceleration")])
def test_a_bend_beyond_its_acceleration_is_a_violation(bend: float, violation: str) -> None:
    actions = np.float32([[0, 0], [0.2, 0], [0.4 - bend, 0]])
    assert rules(acceleration=(1000.0, 1.0)).enforce(actions).violation == violation


def test_values_that_were_clipped_are_counted_also_when_the_chunk_is_then_too_fast() -> None:
    actions = np.float32([[0, 0], [5, 0], [0, 0]])
    assert rules(velocity=(10.0, 10.0)).enforce(actions) == Enforced(1, "velocity")


def test_a_switched_action_takes_the_nearest_of_its_values_and_may_jump() -> None:
    switch = rules(discrete={"b": (2.0, -2.0, 0.5)}, velocity=(10.0, 10.0))
    actions = np.float32([[0, -0.8], [0, 1.1], [0, 90]])
    assert switch.enforce(actions) == Enforced(0, None)
    assert np.array_equal(actions[:, 1], np.float32([-2.0, 0.5, 2.0]))


def test_a_robot_with_limits_of_its_own_is_held_to_those() -> None:
    own = RobotLimits(high=(0.5, 0.5), velocity=(1.0, 1.0))
    actions = np.float32([[0.9, 0.9]] * 3)
    assert rules(own).enforce(actions).clipped == 6
    assert np.array_equal(actions, np.float32([[0.5, 0.5]] * 3))
    quick = [[0, 0], [0.02, 0], [0.02, 0]]
    assert rules(own).enforce(np.float32(quick)).violation == "velocity"
    assert rules().enforce(np.float32(quick)).violation is None


values = st.floats(-3, 3, width=32)


@given(points=st.lists(st.tuples(values, values), min_size=3, max_size=3))
def test_what_passes_the_rules_keeps_every_limit(points: list[tuple[float, float]]) -> None:
    actions = np.array(points, np.float32)
    found = rules(velocity=(100.0, 150.0), acceleration=(15e3, 15e3)).enforce(actions)
    if found.violation is None:
        assert (np.abs(actions) <= [1.0, 2.0]).all()
        assert (np.abs(np.diff(actions, axis=0)) <= np.array([1.0, 1.5]) * 1.0001).all()
        assert (np.abs(np.diff(actions, 2, axis=0)) <= 1.5 * 1.0001).all()
