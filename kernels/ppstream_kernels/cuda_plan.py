"""Launches made once and looked up by their addresses, for sources that stay and for the ops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final, TypeAlias, TypeVar

from torch import Tensor

from ppstream_kernels.cuda_call import make_forms
from ppstream_kernels.cuda_launch import Addresses, Prepared, gpu, make_queue
from ppstream_kernels.source import Columns

Key: TypeAlias = tuple[Hashable, ...]
Queue: TypeAlias = Callable[[], None]  # queues a call with all its addresses
T = TypeVar("T")

MOST_KEPT: Final = 1024  # launches or forms: of a plan, and of the ops per thread
_WORD_BYTES: Final = 16


class CudaPlan:
    """Sources whose memory stays where it is: a call looks up its launch and queues it.

    Counts and heads outside a ring are taken as the nearest that are inside. The first call with
    outputs of a dtype loads its kernel; one with other outputs or targets prepares a launch.

    Args:
        columns: on one CUDA device; checked.
        steps: targets per row and call; they come with the call.
        distinct: of no account here: looking for equal stamps costs a GPU nothing.
        scale: ``[sum of D]`` of outputs in 8 bits; else none.
        wide: of no account here: a GPU computes every row alike.

    Raises:
        RuntimeError: by a call: cuda-core is missing, or the driver refuses the kernel.
    """

    def __init__(
        self,
        columns: Columns,
        steps: int,
        *,
        distinct: bool = False,
        scale: Tensor | None = None,
        wide: bool = False,
    ) -> None:
        self._columns, self._forms, self._scale = columns, Forms(), scale
        self._queues: dict[Key, Queue] = {}

    def run(self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor) -> None:
        """Queues the writing of every element of the last three, on torch's current stream."""
        key = (
            tgt_ns.data_ptr(),
            values.data_ptr(),
            valid.data_ptr(),
            age_s.data_ptr(),
            values.dtype,
        )
        queue = self._queues.get(key)
        if queue is None:
            queue = self._forms.queue(self._columns, tgt_ns, values, valid, age_s, self._scale)
            keep(self._queues, key, queue)
        queue()

    def bind(
        self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor
    ) -> Callable[[], None]:
        """``run`` of these tensors."""
        return partial(self.run, tgt_ns, values, valid, age_s)


class Forms:
    """The forms of calls that differ in more than addresses."""

    def __init__(self) -> None:
        self._of: dict[Key, Sequence[Prepared]] = {}

    def queue(
        self,
        columns: Columns,
        tgt_ns: Tensor,
        values: Tensor,
        valid: Tensor,
        age_s: Tensor,
        scale: Tensor | None = None,
    ) -> Queue:
        """Returns a call that queues writing the last three, until a tensor lies elsewhere.

        Outputs are values ``[B, T, sum of D]``, valid and age_s ``[B, T, S]``, contiguous;
        arguments are checked. ``scale`` comes with values in 8 bits.

        Raises:
            RuntimeError: cuda-core is missing, or does not get on with this GPU or driver.
            ValueError: a ring has more elements than the kernel counts.
        """
        key = _form_key(columns, tgt_ns, values)
        forms = self._of.get(key)
        if forms is None:
            forms = _prepare(columns, tgt_ns, values)
            keep(self._of, key, forms)
        written = (values.data_ptr(), valid.data_ptr(), age_s.data_ptr())
        header = (*written, tgt_ns.data_ptr(), 0 if scale is None else scale.data_ptr())
        streams = [_addresses(*stream) for stream in zip(*columns[:4], strict=True)]
        return _one_after_another([make_queue(form, header, streams) for form in forms])


def _one_after_another(queues: Sequence[Queue]) -> Queue:
    if len(queues) == 1:
        return queues[0]

    def queue() -> None:
        for one in queues:
            one()

    return queue


def _prepare(columns: Columns, tgt_ns: Tensor, values: Tensor) -> list[Prepared]:
    if tgt_ns.numel() == 0:
        return []
    index: int = tgt_ns.device.index
    return [Prepared(form, index) for form in make_forms(columns, tgt_ns, values, gpu(index))]


def keep(kept: dict[Key, T], key: Key, what: T) -> None:
    """Puts ``what`` into ``kept``, which starts anew rather than grow without end."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = what


def _addresses(
    values: Tensor, stamps_ns: Tensor, count: Tensor | None, head: Tensor | None
) -> Addresses:
    return (
        values.data_ptr(),
        stamps_ns.data_ptr(),
        0 if count is None else count.data_ptr(),
        0 if head is None else head.data_ptr(),
    )


def _form_key(columns: Columns, tgt_ns: Tensor, values: Tensor) -> Key:
    """Whatever a form depends on; of addresses that is their alignment."""
    streams = [
        (
            samples.shape,
            samples.stride(),
            samples.dtype,
            samples.data_ptr() % _WORD_BYTES,
            stamps_ns.stride(),
            None if count is None else count.stride(),
            None if head is None else head.stride(),
        )
        for samples, stamps_ns, count, head in zip(*columns[:4], strict=True)
    ]
    return (
        tgt_ns.shape,
        tgt_ns.stride(),
        tgt_ns.device.index,
        values.dtype,
        values.data_ptr() % _WORD_BYTES,
        *streams,
        *columns.modes,
        *columns.max_gap_ns,
        *columns.max_age_ns,
    )
