"""Batch sizes: how many rows of an envelope a policy is called with.

A robot takes the lowest free row, so the rows of those that are there are mostly the first ones.
A policy that says ``any_rows = True`` is called with the first rows alone, as many as the smallest
of a few sizes holds; every row stays where it is, so a policy that remembers rows is not misled.
The rows behind are nobody's: what stands in their outputs is the fill of ``unwritten.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ppstream.config.schema import PipelineConfig
    from ppstream.policy.protocol import Policy

#: On every hop, for all rows: who is there, and in which episode.
PRESENT: Final = "present"
ALWAYS: Final = ("rows", PRESENT)
ONE: Final = 1  # of a byte of ``present``


class BatchSizes:
    """Sizes of one policy's batches.

    Args:
        sizes: ascending; the last is the whole batch.

    Attributes:
        whole: rows of the whole batch.
        smaller: the other sizes.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.whole = sizes[-1]
        self.smaller = sizes[:-1]
        known: tuple[int | None, ...] = (*sizes[:-1], None)
        self._for = [known[bisect_left(sizes, n)] for n in range(self.whole + 1)]

    def rows_for(self, present: bytes) -> int | None:
        """Returns the smallest size that holds all rows marked in ``present``, bool ``[B]``.

        None: the whole batch, as ``RowsCall`` takes it.
        """
        return self._for[present.rfind(ONE) + 1]


def batch_sizes(config: PipelineConfig, policy: Policy) -> BatchSizes:
    """Returns the sizes that ``batch.sizes`` allows; the whole batch if ``policy`` takes no other.

    A compiled policy is called with the whole batch: its code is made for one shape.
    """
    rows, wanted = config.batch.rows, config.batch.sizes
    if wanted == "whole" or config.policy.compile or not getattr(policy, "any_rows", False):
        return BatchSizes((rows,))
    if wanted == "all":
        return BatchSizes(tuple(range(1, rows + 1)))
    if wanted == "powers":
        wanted = tuple(1 << k for k in range(rows.bit_length()))
    return BatchSizes((*(size for size in wanted if size < rows), rows))


class RowsCall(Protocol):
    """A call of a policy with the first ``rows`` of its tensors; None: with all."""

    def __call__(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
    ) -> None: ...


def rows_call(policy: Policy) -> RowsCall:
    """Returns ``policy`` as a ``RowsCall``.

    The runtime's own wrappers are one (``takes_rows``): they need what lies behind the rows, too.
    User code is given views of the first rows.
    """
    if getattr(policy, "takes_rows", False):
        wrapper: Any = policy
        call: RowsCall = wrapper
        return call

    def on_views(
        window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
    ) -> None:
        if rows is None:
            policy(window, out)
        else:
            policy(first_rows(window, rows), first_rows(out, rows))

    return on_views


def first_rows(tensors: Mapping[str, Tensor], rows: int) -> Mapping[str, Tensor]:
    """Returns views of the first ``rows`` of each tensor; no name can be bound to another."""
    return MappingProxyType({name: tensor[:rows] for name, tensor in tensors.items()})
