"""The CPU implementation: brackets of all streams at once, their values, how far to trust them.

A small window costs calls, not arithmetic. Therefore indices and times are numpy arrays over the
tensors' own memory (a call costs a third of torch's), one call serves all streams, and a plan keeps
the arrays it computes in.
"""

from __future__ import annotations

from torch import Tensor

from ppstream_kernels.blend import Blend
from ppstream_kernels.bracket import Brackets
from ppstream_kernels.source import Columns
from ppstream_kernels.trust import Trust


class CpuPlan:
    """One set of streams and one number of targets; used by one thread at a time.

    Args:
        columns: streams whose arguments are checked, except for the numbers in counts and heads.
        targets: T.
    """

    def __init__(self, columns: Columns, targets: int) -> None:
        rows = columns.stamps_ns[0].shape[0]
        self._brackets = Brackets(columns, rows, targets)
        self._blend = Blend(columns, self._brackets)
        self._trust = Trust(columns, self._brackets)

    def run(self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor) -> None:
        """Writes every element of values ``[B, T, sum of D]``, valid and age_s ``[B, T, S]``.

        All four are contiguous and fit the plan.

        Raises:
            ValueError: a count or head lies outside its ring.
        """
        self._brackets.find(tgt_ns.numpy())
        self._blend.write(values)
        self._trust.write(valid.numpy(), age_s.numpy())  # consumes the times


def resample_streams_out(
    columns: Columns, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor
) -> None:
    """A plan for one call; targets may be strided."""
    CpuPlan(columns, tgt_ns.shape[1]).run(tgt_ns.contiguous(), values, valid, age_s)
