"""Work that the policy rank queues for one envelope where kernels leave the times: two streams.

    receiving    wait for the peer's count · stamp
    stage B      wait for it, too, stamp · the policy · put the result, stamp and count

The put also leaves the envelope's name for the log. Every kernel and its arguments are the same
each time a slot is used; the host writes counts and headers into pinned memory first. So what
stands in stage B's stream is one graph, where the policy is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.cuda.device_stamps import SlotWords
from ppstream.cuda.driver import LaunchSequence
from ppstream.cuda.linear_graph import LinearGraph
from ppstream.links.device_counters import HEADER_WORDS
from ppstream.pipeline.device.policy_rank_queue import SlotPlan
from ppstream_kernels.cuda_put import Stamps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.cuda.driver import CudaStream
    from ppstream.links.device_counters import CountedLink, Launch
    from ppstream.pipeline.device.stage_b import DeviceStageB

#: Words of a slot: its stamps and its envelope's name, then what its kernels read.
_COMPLETE, _B0, _B1, _LAST = range(4)
_NAMES: Final = 4
_WAIT: Final = _NAMES + HEADER_WORDS  # the envelopes' count
_SEND: Final = _WAIT + 1  # the results' count, then the header
_WIDTH: Final = -(-(_SEND + 1 + HEADER_WORDS) // 8) * 8
_NOTHING: Final = LaunchSequence()


class _Kernels(NamedTuple):
    """Of one slot of either direction."""

    complete: Launch
    begin: Launch
    send: Launch


class StampedSlots:
    """Queues what stands around stage B.

    Args:
        link: of the policy rank, with stamps.
        b: stage B's stream.

    Attributes:
        plans: of each slot, without anything to queue.
    """

    def __init__(self, link: CountedLink, b: CudaStream) -> None:
        self._link, self._b = link, b
        self._slots = SlotWords(len(link.into), _WIDTH)
        self._kernels = [self._of(number) for number in range(len(link.into))]
        self._wholes: list[LinearGraph] = []
        self.plans = tuple(self._plan(number) for number in range(len(link.into)))

    def prepare(self, stage_b: DeviceStageB) -> int:
        """Make the graph of each slot, if ``stage_b`` has them; returns how many there are."""
        graphs = []
        for plan, kernels in zip(self.plans, self._kernels, strict=True):
            policy = stage_b.graph(plan.envelope, plan.result)
            if policy is None:
                return 0
            graphs.append(LinearGraph((kernels.begin, policy, kernels.send)))
        self._wholes = graphs
        return len(graphs)

    @property
    def has_wholes(self) -> bool:
        """True when stage B is a part of a graph: it is queued by ``whole`` alone."""
        return bool(self._wholes)

    def whole(self, index: int, numbers: Sequence[int]) -> None:
        """Queue ``begin``, stage B and ``send``, all at once."""
        self._write_message(index, numbers)
        self._wholes[index % len(self._wholes)].queue(self._b.handle)

    def receipt(self, index: int) -> None:
        """Queue the stamp behind the receipt of ``index``."""
        number = index % len(self._kernels)
        begin, words = number * _WIDTH, self._slots.words
        words[begin + _COMPLETE] = words[begin + _B0] = 0
        words[begin + _B1] = words[begin + _LAST] = 0
        words[begin + _WAIT] = self._link.count_of(index)
        self._kernels[number].complete.queue(self._link.receiving.handle)

    def begin(self, index: int) -> None:
        """Queue the wait in front of stage B of ``index``, whose receipt stands queued."""
        self._kernels[index % len(self._kernels)].begin.queue(self._b.handle)

    def send(self, index: int, numbers: Sequence[int]) -> None:
        """Queue the sending of result ``index`` behind stage B; its header as ``queue_header``."""
        self._write_message(index, numbers)
        self._kernels[index % len(self._kernels)].send.queue(self._b.handle)

    def _write_message(self, index: int, numbers: Sequence[int]) -> None:
        number = index % len(self._kernels)
        words = self._slots.words
        for at, word in enumerate(self._link.message_of(index, numbers), number * _WIDTH + _SEND):
            words[at] = word

    def _of(self, number: int) -> _Kernels:
        link, b = self._link, self._b

        def at(word: int) -> int:
            return self._slots.address(number, word)

        named = link.into[number].address, HEADER_WORDS
        stamps = Stamps(at(_SEND), at(_B1), at(_LAST), at(_NAMES), *named)
        return _Kernels(
            link.stamped_wait(link.receiving, at(_WAIT), at(_COMPLETE)),
            link.stamped_wait(b, at(_WAIT), at(_B0)),
            link.stamped_send(number, b, stamps),
        )

    def _plan(self, number: int) -> SlotPlan:
        stamp: Any = self._slots.stamp
        begin = number * _WIDTH + _NAMES
        names = np.frombuffer(self._slots.words[begin : begin + HEADER_WORDS], np.int64)
        last = stamp(number, _LAST)
        return SlotPlan(
            self._link.into[number],
            self._link.out[number],
            names,
            complete=stamp(number, _COMPLETE),
            named=last,
            b0=stamp(number, _B0),
            b1=stamp(number, _B1),
            last=last,
            behind_receipt=_NOTHING,
            before_b=_NOTHING,
            behind_b=_NOTHING,
            behind_send=_NOTHING,
            carry=_NOTHING,
            carry_fault=_NOTHING,
        )
