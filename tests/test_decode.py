import numpy as np
import pytest

from ppstream.config import ActionConfig
from ppstream.decode import build, enforce
from ppstream.errors import ConfigError

ACTIONS = ActionConfig(
    names=("a", "b"), horizon=3, dt_ms=10, low=(-1.0, -2.0), high=(1.0, 2.0), lease_ms=100
)
LOW, HIGH = np.float32([-1.0, -2.0]), np.float32([1.0, 2.0])


def test_the_default_decoder_copies_the_actions_of_the_row() -> None:
    wanted = np.arange(6, dtype=np.float32).reshape(3, 2)
    actions = np.zeros((3, 2), np.float32)
    build({}, ACTIONS)(0, {"actions": wanted, "other": wanted * 2}, actions)
    assert np.array_equal(actions, wanted)
    assert not np.shares_memory(actions, wanted)


def test_the_default_decoder_refuses_options_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"decode\.options.*'gain'"):
        build({"gain": 2}, ACTIONS)


def test_enforce_clips_each_action_into_its_own_limits_and_counts_values() -> None:
    actions = np.float32([[0.5, 1.5], [1.5, 3.0], [-1.0, -2.5]])
    assert enforce(actions, LOW, HIGH) == (3, True)
    assert np.array_equal(actions, np.float32([[0.5, 1.5], [1.0, 2.0], [-1.0, -2.0]]))


def test_enforce_leaves_actions_on_the_limit_alone() -> None:
    actions = np.float32([[1.0, -2.0]])
    assert enforce(actions, LOW, HIGH) == (0, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_enforce_never_turns_a_non_finite_value_into_a_usable_one(bad: float) -> None:
    actions = np.float32([[bad, 5.0]])
    assert not enforce(actions, LOW, HIGH).finite
    assert not np.isfinite(actions[0, 0])
