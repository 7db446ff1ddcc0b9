from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ppstream.config.load import read
from ppstream.core.errors import ConfigError
from ppstream.ingest.intake import build_intake
from ppstream.policy.protocol import load_target
from ppstream_stages.cartpole.layout import DIM, FORCE_MAX_N, HORIZON, STREAMS, WINDOW_STEPS
from ppstream_stages.cartpole.policy import VIEWS, WEIGHTS, CartPolePolicy, build, seen_by_views

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy() -> CartPolePolicy:
    return build({}, CPU)


def window(rows: int = 1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(rows, WINDOW_STEPS, DIM, generator=random) * 0.02
    shape = (rows, WINDOW_STEPS, len(STREAMS))
    valid = torch.ones(shape, dtype=torch.bool)
    return {"state.values": values, "state.valid": valid, "state.age_s": torch.zeros(shape)}


def run(policy: CartPolePolicy, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = len(inputs["state.values"])
    out = {spec.name: torch.full((rows, *spec.shape), torch.nan) for spec in policy.outputs}
    policy(inputs, out)
    return out


def test_the_shipped_weights_are_small_and_the_ones_the_configuration_names() -> None:
    assert WEIGHTS.stat().st_size <= 2_000_000
    config = read("demo")
    assert config.policy.weights is not None
    assert Path(config.policy.weights) == WEIGHTS
    assert load_target(config.policy.target) is build


def test_it_takes_the_windows_that_the_demo_cuts(policy: CartPolePolicy) -> None:
    cut = {spec.name: spec for spec in build_intake(read("demo")).cutter.inputs}
    assert [cut[spec.name] for spec in policy.inputs] == list(policy.inputs)


def test_it_writes_every_output_within_the_limit(policy: CartPolePolicy) -> None:
    inputs = window()
    inputs["state.values"] *= 1000
    out = run(policy, inputs)
    assert all(torch.isfinite(tensor).all() for tensor in out.values())
    assert out["proposals"].abs().max() <= FORCE_MAX_N
    assert out["actions"].shape == (1, HORIZON, 1)


def test_it_keeps_no_state_between_calls(policy: CartPolePolicy) -> None:
    first = run(policy, window())
    run(policy, {name: tensor * 0 for name, tensor in window().items()})
    again = run(policy, window())
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_rows_do_not_see_each_other(policy: CartPolePolicy) -> None:
    together = window(rows=2)
    for row in range(2):
        alone = run(policy, {name: tensor[row : row + 1] for name, tensor in together.items()})
        assert torch.equal(run(policy, together)["actions"][row], alone["actions"][0])


@pytest.mark.parametrize("view", range(len(VIEWS)))
def test_a_view_proposes_without_what_it_must_not_see(policy: CartPolePolicy, view: int) -> None:
    hidden = seen_by_views().values[view] == 0
    inputs = window()
    before = run(policy, inputs)["proposals"][0, view]
    inputs["state.values"][0, hidden] += 1.0
    assert torch.equal(run(policy, inputs)["proposals"][0, view], before)
    inputs["state.values"][0, ~hidden] += 0.1
    assert not torch.equal(run(policy, inputs)["proposals"][0, view], before)


def test_values_marked_invalid_are_told_from_valid_zeros(policy: CartPolePolicy) -> None:
    inputs = window()
    before = run(policy, inputs)["actions"]
    inputs["state.valid"][:, : WINDOW_STEPS // 4] = False
    assert not torch.equal(run(policy, inputs)["actions"], before)


def test_it_pushes_the_cart_under_a_leaning_pole(policy: CartPolePolicy) -> None:
    leaning = window()
    leaning["state.values"][:] = torch.tensor([0.0, 0.05, 0.0, 0.0, 9.81, 0.0225, 0.45])
    assert float(run(policy, leaning)["actions"][0, 4, 0]) > 0.5
    leaning["state.values"][:] = torch.tensor([0.0, -0.05, 0.0, 0.0, 9.81, -0.0225, 0.45])
    assert float(run(policy, leaning)["actions"][0, 4, 0]) < -0.5


def test_weights_that_do_not_fit_are_a_configuration_error(tmp_path: Path) -> None:
    weights = load_file(WEIGHTS)
    weights["head.bias"] = torch.zeros(3)
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"policy\.weights.*head\.bias"):
        build({"weights": str(tmp_path / "other.safetensors")}, CPU)
    with pytest.raises(ConfigError, match=r"policy\.weights.*nowhere"):
        build({"weights": str(tmp_path / "nowhere.safetensors")}, CPU)


def test_the_state_estimate_follows_the_encoder(policy: CartPolePolicy) -> None:
    still = window()
    still["state.values"][:] = torch.tensor([0.1, 0.0, 0.0, 0.0, 9.81, 0.1, 0.45])
    assert np.allclose(run(policy, still)["state"][0, :2], [0.1, 0.0], atol=0.02)
