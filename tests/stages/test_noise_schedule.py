from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ppstream_stages.noise_schedule import NoiseSchedule


def schedule_of(kind: str, betas: str, predicts: str, steps: int = 10) -> NoiseSchedule:
    return NoiseSchedule(kind, betas, (1e-4, 0.02), 50, steps, predicts, None)


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize("betas", ["squaredcos_cap_v2", "linear"])
def test_each_step_leads_to_the_shares_of_the_next(kind: str, betas: str) -> None:
    steps = schedule_of(kind, betas, "epsilon").steps
    assert [step.time for step in steps] == [45, 40, 35, 30, 25, 20, 15, 10, 5, 0]
    shares = [(step.signal, step.noise) for step in steps]
    for step, (signal, noise) in zip(steps, [*shares[1:], (1.0, 0.0)], strict=True):
        assert step.from_clean + step.from_noisy * step.signal == pytest.approx(signal, abs=1e-5)
        spread = (step.from_noisy * step.noise) ** 2 + step.from_noise**2 + (step.fresh or 0) ** 2
        assert spread == pytest.approx(noise**2, abs=1e-5)
    assert all(first < second for (first, _), (second, _) in pairwise(shares))


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize("predicts", ["epsilon", "sample"])
def test_a_network_that_knows_the_sample_leads_to_it(kind: str, predicts: str) -> None:
    schedule = schedule_of(kind, "squaredcos_cap_v2", predicts)
    torch.manual_seed(2)
    clean, noisy = torch.rand(3, 8, 4), torch.randn(3, 8, 4)
    for step in schedule.steps:
        noise = (noisy - step.signal * clean) / step.noise
        noisy = schedule.next_of(step, noisy, noise if predicts == "epsilon" else clean)
        if step.fresh is not None:
            noisy = noisy + step.fresh * torch.randn_like(noisy)
    assert (noisy - clean).abs().max() <= 1e-4
    assert schedule.draws == {"DDPM": 10, "DDIM": 1}[kind]
