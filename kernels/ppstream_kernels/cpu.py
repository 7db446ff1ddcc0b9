"""The CPU implementation: brackets of all streams at once, their values, how far to trust them.

A small window costs calls, not arithmetic. Therefore indices and times are numpy arrays over the
tensors' own memory (a call costs a third of torch's), one call serves all streams, and a plan keeps
the arrays it computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ppstream_kernels.blend import Blend, BlendOutput, output_of
from ppstream_kernels.bracket import Brackets
from ppstream_kernels.quantisation import round_into
from ppstream_kernels.rings import Bools, Int64s
from ppstream_kernels.source import Columns
from ppstream_kernels.trust import Float32s, Trust

# S=streams B=rows T=targets


class CpuPlan:
    """One set of streams and one number of targets; used by one thread at a time.

    Args:
        columns: streams whose arguments are checked, except for the numbers in counts and heads.
        targets: T.
        distinct: no row holds two equal stamps.
        scale: ``[sum of D]`` of outputs in 8 bits; else none.
        wide: linear is mixed in float64 whatever the size.
    """

    def __init__(
        self,
        columns: Columns,
        targets: int,
        *,
        distinct: bool = False,
        scale: Tensor | None = None,
        wide: bool = False,
    ) -> None:
        rows = columns.stamps_ns[0].shape[0]
        self._scale, self._unscaled = scale, torch.empty(0)
        if scale is not None:
            self._unscaled = torch.empty(rows, targets, len(scale))
        self._brackets = Brackets(columns, rows, targets, distinct=distinct)
        self._blend = Blend(columns, self._brackets, wide=wide)
        self._trust = Trust(columns, self._brackets)

    def bind(
        self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor
    ) -> Callable[[], None]:
        """A call that writes every element of the last three, as the targets are at that time.

        values ``[B, T, sum of D]``, valid and age_s ``[B, T, S]``; all four are contiguous, fit the
        plan and are kept.

        Raises:
            ValueError: by the call: a count or head lies outside its ring.
        """
        by_stream = (2, 0, 1)
        valid_SBT = valid.numpy().transpose(by_stream)
        age_s_SBT = age_s.numpy().transpose(by_stream)
        if self._scale is None:
            return partial(self._run, tgt_ns.numpy(), output_of(values), valid_SBT, age_s_SBT)
        wide = output_of(self._unscaled)
        write = partial(self._run, tgt_ns.numpy(), wide, valid_SBT, age_s_SBT)
        return partial(self._run_scaled, write, self._scale, values)

    def run(self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor) -> None:
        """Runs what ``bind`` prepares, once."""
        self.bind(tgt_ns, values, valid, age_s)()

    def _run_scaled(self, write: Callable[[], None], scale: Tensor, values: Tensor) -> None:
        write()
        round_into(self._unscaled, scale, values)

    def _run(
        self, tgt_ns_BT: Int64s, values: BlendOutput, valid_SBT: Bools, age_s_SBT: Float32s
    ) -> None:
        self._brackets.find(tgt_ns_BT)
        self._blend.write(values)
        self._trust.write(valid_SBT, age_s_SBT)  # consumes the times


def resample_streams_out(
    columns: Columns,
    tgt_ns: Tensor,
    values: Tensor,
    valid: Tensor,
    age_s: Tensor,
    scale: Tensor | None = None,
) -> None:
    """A plan for one call; targets may be strided."""
    plan = CpuPlan(columns, tgt_ns.shape[1], scale=scale)
    plan.run(tgt_ns.contiguous(), values, valid, age_s)
