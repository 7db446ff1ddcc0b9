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

    b_ms: NonNegative | None = None  # mean duration
    parts_ms: tuple[NonNegative, ...] = ()  # instead, mean durations of a policy in so many parts
    hop_bytes: Annotated[int, Meta(ge=1)] = 4  # that each part hands to the next
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
    """Spends one duration per envelope, whatever the envelope holds; or a part of such a policy."""

    stateless = True
    any_rows = True

    def __init__(
        self,
        name: str,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        spend: Callable[[], None],
    ) -> None:
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self._spend = spend

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._spend()
        for tensor in out.values():
            tensor.zero_()


def build(config: Mapping[str, Any], device: torch.device) -> Any:
    """A simulated policy with the given ``Options``; the device is used by ``kind = "gpu"`` alone.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, or the device is no GPU.
    """
    options = options_of(config, Options)
    if (options.b_ms is None) == (not options.parts_ms):
        raise ConfigError(["policy.options: want either b_ms or parts_ms, how long stage B takes"])
    actions = TensorSpec("actions", (options.horizon, options.action_dim))
    payload = TensorSpec("payload", (options.payload,), "uint8") if options.payload else None
    result = (actions,) if payload is None else (actions, payload)
    means_ms = options.parts_ms or (options.b_ms or 0.0,)
    hops = [
        (TensorSpec(f"hop_{k}", (options.hop_bytes,), "bool"),) for k in range(1, len(means_ms))
    ]
    edges = [(), *hops, result]
    parts = [
        SimulatedPolicy(f"part_{k + 1}", edges[k], edges[k + 1], _work(options, mean_ms, device, k))
        for k, mean_ms in enumerate(means_ms)
    ]
    return parts if options.parts_ms else parts[0]


def _work(options: Options, mean_ms: float, device: torch.device, part: int) -> Callable[[], None]:
    if options.kind != "gpu":
        return Delay(mean_ms, options.kind, options.law, options.seed + part).spend
    if device.type != "cuda":
        raise ConfigError(
            [f"policy.options.kind: got 'gpu' on {device}, want a CUDA device as placement.policy"]
        )
    return GpuWork(mean_ms, device).queue
