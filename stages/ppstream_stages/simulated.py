"""A policy that only takes time: for sweeps, benchmarks and runs checked against the period model.

Its actions are zeros; never let a robot execute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ppstream import ConfigError, TensorSpec
from ppstream.config.schema import Count, NonNegative
from ppstream.core.simulated_delay import Delay
from ppstream.cuda.busy_kernel import GpuWork
from ppstream_stages.building import options_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``; the same seed draws the same durations."""

    b_ms: NonNegative  # mean duration
    horizon: Count
    action_dim: Count
    kind: Literal["sleep", "spin", "gpu"] = "sleep"  # gpu: constant work on the policy's device
    law: Literal["constant", "uniform", "tail"] = "constant"
    seed: int = 0
    weights: None = None  # it has nothing to load
    payload: Annotated[int, Meta(ge=0)] = (
        0  # bytes of a second output that makes results heavier; 0: none
    )


class SimulatedPolicy:
    """Spends one duration per envelope, whatever the envelope holds."""

    inputs: tuple[TensorSpec, ...] = ()
    stateless = True

    def __init__(self, options: Options, device: torch.device) -> None:
        self._spend = _work(options, device)
        actions = TensorSpec("actions", (options.horizon, options.action_dim))
        payload = TensorSpec("payload", (options.payload,), "uint8") if options.payload else None
        self.outputs = (actions,) if payload is None else (actions, payload)

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._spend()
        for tensor in out.values():
            tensor.zero_()


def build(config: Mapping[str, Any], device: torch.device) -> SimulatedPolicy:
    """A simulated stage B with the given ``Options``; the device is used by ``kind = "gpu"`` alone.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, or the device is no GPU.
    """
    options = options_of(config, Options)
    return SimulatedPolicy(options, device)


def _work(options: Options, device: torch.device) -> Callable[[], None]:
    if options.kind != "gpu":
        return Delay(options.b_ms, options.kind, options.law, options.seed).spend
    if device.type != "cuda":
        raise ConfigError(
            [f"policy.options.kind: got 'gpu' on {device}, want a CUDA device as placement.policy"]
        )
    return GpuWork(options.b_ms, device).queue
