"""Calls on CUDA tensors: once, with whatever comes, or prepared for sources that stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from torch import Tensor

from ppstream_kernels.cuda_launch import Launch, make_launches
from ppstream_kernels.source import Columns

_MOST_FORMS: Final = 512  # kept per thread
_WORD_BYTES: Final = 16


class CudaPlan:
    """Sources whose memory stays where it is: a call sets four addresses and launches.

    Counts and heads outside a ring are taken as the nearest that are inside. The first call with
    outputs of a dtype loads its kernel.

    Args:
        columns: on one CUDA device; checked.
        steps: targets per row and call; they come with the call.

    Raises:
        RuntimeError: by a call: cuda-core is missing, or the driver refuses the kernel.
    """

    def __init__(self, columns: Columns, steps: int) -> None:
        self._columns, self._steps = columns, steps
        self._launches: dict[tuple[object, ...], Sequence[Launch]] = {}

    def run(self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor) -> None:
        """Queues the writing of every element of the last three, on torch's current stream."""
        key = (values.dtype, values.data_ptr() % _WORD_BYTES)
        launches = self._launches.get(key)
        if launches is None:
            launches = self._launches[key] = make_launches(self._columns, tgt_ns, values)
            for launch in launches:
                launch.read_from(self._columns)
        _queue(launches, tgt_ns, values, valid, age_s)

    def bind(
        self, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor
    ) -> Callable[[], None]:
        """``run`` of these tensors."""
        return partial(self.run, tgt_ns, values, valid, age_s)


class _Launches(threading.local):
    """Per thread, since addresses are written into a launch."""

    def __init__(self) -> None:
        self.of: dict[tuple[object, ...], Sequence[Launch]] = {}


_launches: Final = _Launches()


def resample_streams_out(
    columns: Columns, tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor
) -> None:
    """As ``CudaPlan(columns, T).run``, with its preparation kept for calls of the same form.

    Outputs are values ``[B, T, sum of D]``, valid and age_s ``[B, T, S]``, contiguous; arguments
    are checked.
    """
    key = _key(columns, tgt_ns, values)
    launches = _launches.of.get(key)
    if launches is None:
        if len(_launches.of) >= _MOST_FORMS:
            _launches.of.clear()
        launches = _launches.of[key] = make_launches(columns, tgt_ns, values)
    for launch in launches:
        launch.read_from(columns)
    _queue(launches, tgt_ns, values, valid, age_s)


def _queue(
    launches: Sequence[Launch], tgt_ns: Tensor, values: Tensor, valid: Tensor, age_s: Tensor
) -> None:
    for launch in launches:
        launch.queue(values.data_ptr(), valid.data_ptr(), age_s.data_ptr(), tgt_ns.data_ptr())


def _key(columns: Columns, tgt_ns: Tensor, values: Tensor) -> tuple[object, ...]:
    """Whatever a launch depends on; of addresses that is their alignment."""
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
