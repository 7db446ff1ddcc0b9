"""The steps of a schedule that turn noise into a sample: DDPM, and DDIM without fresh noise.

Numbers of a step are computed when the schedule is made, in float32 as diffusers computes them.
No network and no random number stands here.
"""

from __future__ import annotations

from math import cos, pi
from typing import Final, NamedTuple

import torch
from torch import Tensor

KINDS: Final = ("DDPM", "DDIM")
BETAS: Final = ("squaredcos_cap_v2", "linear")
PREDICTIONS: Final = ("epsilon", "sample")
COSINE_OFFSET: Final = 0.008
BETA_MAX: Final = 0.999  # of the cosine schedule
VARIANCE_MIN: Final = 1e-20
CPU: Final = torch.device("cpu")


class DenoisingStep(NamedTuple):
    """From a noisy sample at ``time`` to the next, which is less noisy."""

    time: int  # of training's steps
    signal: float  # share of the clean sample in the noisy one
    noise: float  # share of noise
    from_clean: float  # share of each in the next sample
    from_noisy: float
    from_noise: float
    fresh: float | None  # standard deviation of noise that is added; None: none is drawn


class NoiseSchedule:
    """Steps, and what a network predicts.

    Args:
        kind: of ``KINDS``.
        betas: of ``BETAS``.
        ends: the first and the last beta, where they are ``linear``.
        train_steps: of training.
        steps: of one call, at most as many.
        predicts: of ``PREDICTIONS``: the noise, or the clean sample.
        limit: of the clean sample's values, both ways; None: there is none.
    """

    def __init__(
        self,
        kind: str,
        betas: str,
        ends: tuple[float, float],
        train_steps: int,
        steps: int,
        predicts: str,
        limit: float | None,
    ) -> None:
        kept = (1 - _betas(betas, ends, train_steps)).cumprod(0)
        stride = train_steps // steps
        make = _ddpm_step if kind == "DDPM" else _ddim_step
        one = torch.ones((), device=CPU)
        self.steps = tuple(
            make(time, kept[time], kept[time - stride] if time else one)
            for time in range((steps - 1) * stride, -1, -stride)
        )
        self._predicts_noise, self._limit = predicts == "epsilon", limit

    @property
    def draws(self) -> int:
        """Tensors of noise for one sample: the first one, and one for each step that adds some."""
        return 1 + sum(step.fresh is not None for step in self.steps)

    def shares_behind(self, index: int) -> tuple[float, float]:
        """Shares of the clean sample and of noise in what the step of ``index`` makes."""
        behind = self.steps[index + 1 : index + 2]
        return (behind[0].signal, behind[0].noise) if behind else (1.0, 0.0)

    def next_of(self, step: DenoisingStep, noisy: Tensor, predicted: Tensor) -> Tensor:
        """The next sample without fresh noise, of the shape of ``noisy`` and ``predicted``."""
        clean = predicted
        if self._predicts_noise:
            clean = (noisy - step.noise * predicted) / step.signal
        if self._limit is not None:
            clean = clean.clamp(-self._limit, self._limit)
        if not step.from_noise:
            return step.from_clean * clean + step.from_noisy * noisy
        noise = predicted
        if not self._predicts_noise:
            noise = (noisy - step.signal * predicted) / step.noise
        return step.from_clean * clean + step.from_noise * noise


def _betas(name: str, ends: tuple[float, float], count: int) -> Tensor:
    """Noise that each step of training adds, ``[count]``."""
    if name == "linear":
        return torch.linspace(*ends, count, dtype=torch.float32, device=CPU)

    def kept(at: float) -> float:
        return cos((at + COSINE_OFFSET) / (1 + COSINE_OFFSET) * pi / 2) ** 2

    found = [1 - kept((index + 1) / count) / kept(index / count) for index in range(count)]
    return torch.tensor([min(beta, BETA_MAX) for beta in found], dtype=torch.float32, device=CPU)


def _ddpm_step(time: int, kept: Tensor, kept_next: Tensor) -> DenoisingStep:
    """The mean and the spread of what a sample was before the noise of these steps."""
    share = kept / kept_next
    variance = ((1 - kept_next) / (1 - kept) * (1 - share)).clamp(min=VARIANCE_MIN)
    return DenoisingStep(
        time=time,
        signal=float(kept**0.5),
        noise=float((1 - kept) ** 0.5),
        from_clean=float(kept_next**0.5 * (1 - share) / (1 - kept)),
        from_noisy=float(share**0.5 * (1 - kept_next) / (1 - kept)),
        from_noise=0.0,
        fresh=float(variance**0.5) if time else None,
    )


def _ddim_step(time: int, kept: Tensor, kept_next: Tensor) -> DenoisingStep:
    """The clean sample with the same noise, but less of it."""
    return DenoisingStep(
        time=time,
        signal=float(kept**0.5),
        noise=float((1 - kept) ** 0.5),
        from_clean=float(kept_next**0.5),
        from_noisy=0.0,
        from_noise=float((1 - kept_next) ** 0.5),
        fresh=None,
    )
