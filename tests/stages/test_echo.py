import pytest
import torch

from ppstream.core.errors import ConfigError
from ppstream_stages.echo import build

CPU = torch.device("cpu")


def test_step_i_of_the_actions_is_the_ith_newest_value_bit_for_bit() -> None:
    policy = build({"steps": 5, "dim": 3, "horizon": 4, "action_dim": 2}, CPU)
    values = torch.randn(2, 5, 3)
    out = {"actions": torch.zeros(2, 4, 2)}
    policy({"state.values": values}, out)
    for step in range(4):
        assert torch.equal(out["actions"][:, step], values[:, 4 - step, :2])


def test_horizon_and_actions_beyond_the_input_wrap_around() -> None:
    policy = build({"steps": 2, "dim": 1, "horizon": 3, "action_dim": 2, "group": "arm"}, CPU)
    out = {"actions": torch.zeros(1, 3, 2)}
    policy({"arm.values": torch.tensor([[[1.0], [2.0]]])}, out)
    assert out["actions"].tolist() == [[[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]]


def test_a_missing_size_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"policy\.options.*dim"):
        build({"steps": 2, "horizon": 3, "action_dim": 2}, CPU)
