"""ResamplePlan: ``resample_streams`` for sources that stay, prepared once, called per window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from torch import Tensor

from ppstream_kernels.arguments import check_plan, check_scale
from ppstream_kernels.cpu import CpuPlan
from ppstream_kernels.cuda_plan import CudaPlan
from ppstream_kernels.source import Columns, StreamSource, to_columns


class DevicePlan(Protocol):
    """A device's part of a plan: everything prepared, and the call."""

    def run(self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor) -> None:
        """Writes values ``[B, T, sum of D]``, valid and age_s ``[B, T, S]``; checks no argument."""

    def bind(
        self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor
    ) -> Callable[[], None]:
        """``run`` of tensors that come again and again."""


class MakePlan(Protocol):
    """Preparation for a type of device, from its streams and the number of targets."""

    def __call__(
        self,
        columns: Columns,
        targets: int,
        /,
        *,
        distinct: bool,
        scale: Tensor | None,
        wide: bool,
    ) -> DevicePlan: ...


DEVICE_PLANS: Final[Mapping[str, MakePlan]] = {"cpu": CpuPlan, "cuda": CudaPlan}


class ResamplePlan:
    """Several streams at a fixed number of targets, into memory of the caller's.

    Unless ``wide`` the result is that of ``resample_streams`` bit for bit, without its checks,
    views, allocations and dispatch per call. The sources are read in place, as they are at each
    call. A plan computes in memory of its own: one thread at a time. torch.compile does not look
    inside; ops it can trace are ``resample_streams``'.

    Args:
        sources: one or more on one device with the same B; values and stamps contiguous.
        steps: T, targets per row and call.
        distinct: no row ever holds two equal stamps, as the rings' owner sees to: a call on the CPU
            need not look for them.
        scale: ``[sum of D]`` float32 on the sources' device: outputs are in 8 bits
            (``quantisation.py``).
        wide: the CPU mixes linear streams in float64 at any size: rows of different batches get
            the same bits, for up to four times the time of a large call.

    Raises:
        ValueError: ``sources`` or ``steps`` is not as above, or no implementation of the device.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        steps: int,
        *,
        distinct: bool = False,
        scale: Tensor | None = None,
        wide: bool = False,
    ) -> None:
        check_plan(sources, steps, tuple(DEVICE_PLANS))
        if scale is not None:
            check_scale(sources, scale)
        prepare = DEVICE_PLANS[sources[0].values.device.type]
        self._plan = prepare(to_columns(sources), steps, distinct=distinct, scale=scale, wide=wide)

    def __call__(self, tgt_ns: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> None:
        """Write every element of ``out``.

        Nothing is checked but the rings: other tensors than these give errors of numpy's or torch's
        own, or wrong results.

        Args:
            tgt_ns: ``[B, T]`` int64, contiguous, on the sources' device.
            out: contiguous ``[B, T, sum of D]`` of any of the four dtypes (with a scale int8 or
                float8_e4m3fn), ``[B, T, S]`` bool and ``[B, T, S]`` float32, on the sources'
                device.

        Raises:
            ValueError: on the CPU, a count or head lies outside its ring.
        """
        self._plan.run(tgt_ns, *out)

    def bind(self, tgt_ns: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
        """A call like the plan's with these tensors, for those that come again, as slots do.

        They are kept as long as the call is. Arguments and errors are the plan's.
        """
        return self._plan.bind(tgt_ns, *out)
