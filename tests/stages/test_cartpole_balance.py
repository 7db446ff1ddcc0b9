import pytest
import torch

from ppstream.config.load import read
from ppstream_stages.cartpole import decode, policy
from ppstream_stages.cartpole.lockstep import Controller, simulate, unpipelined

PERIOD_MS = 20  # coarser than the pipeline's, so that the test is twice as fast


@pytest.fixture(scope="module")
def controller() -> Controller:
    config = read("demo")
    stage_b = policy.build({"weights": config.policy.weights}, torch.device("cpu"))
    return unpipelined(stage_b, decode.build({}, config.actions))


@pytest.mark.parametrize("seed", [101])
def test_it_stands_with_the_pipelines_delay(controller: Controller, seed: int) -> None:
    result = simulate(controller, delay_ms=30, period_ms=PERIOD_MS, seed=seed, seconds=3)
    assert result.stood_s == pytest.approx(3.0)
    assert not result.fell
    assert result.largest_angle_rad < 0.3


@pytest.mark.parametrize("seed", [101, 102, 103])
def test_it_falls_when_80_ms_are_added(controller: Controller, seed: int) -> None:
    result = simulate(controller, delay_ms=110, period_ms=PERIOD_MS, seed=seed, seconds=3)
    assert result.fell
    assert result.stood_s < 2.0


def test_it_falls_when_the_policy_does_nothing(controller: Controller) -> None:
    def idle(window: object) -> object:
        return controller(window) * 0  # type: ignore[arg-type]

    assert simulate(idle, delay_ms=30, period_ms=50, seed=101, seconds=2).fell  # type: ignore[arg-type]
