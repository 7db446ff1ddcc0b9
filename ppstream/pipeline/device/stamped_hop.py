"""The policy rank's link where its kernels leave the times: less to queue, and on two streams.

    receiving    wait for the peer's count · stamp
    stage B      wait for it, too, stamp · the policy · put the result, stamp and count

The put also leaves the envelope's name for the log. Every kernel and its arguments are the same
each time a slot is used; the host writes counts and headers into pinned memory first. So what
stands in stage B's stream is one graph, where the policy is one; two, where it has a memory, with
the call of its ``reset`` between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.cuda.device_stamps import DeviceStamp, SlotWords
from ppstream.cuda.driver import DriverCall, LaunchSequence
from ppstream.cuda.linear_graph import LinearGraph
from ppstream.links.device_counters import HEADER_WORDS
from ppstream.links.headers import EPOCH, FAILED
from ppstream.pipeline.device.policy_rank_queue import StageMoments
from ppstream_kernels.cuda_put import Stamps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.cuda.driver import CudaStream
    from ppstream.links.device_counters import CountedLink, Launch
    from ppstream.pipeline.device.policy_rank_queue import SlotPlan
    from ppstream.pipeline.device.stage_b import DeviceStageB

#: Words of a slot: its stamps, what its kernels read, and its envelope's name, which they leave.
_COMPLETE, _B0, _B1, _LAST = range(4)
_WAIT: Final = 4  # the envelopes' count, behind the stamps: both are written at once
_SEND: Final = _WAIT + 1  # the results' count, then the header
_NAMES: Final = _SEND + 1 + HEADER_WORDS
_WIDTH: Final = -(-(_NAMES + HEADER_WORDS) // 8) * 8
_NOTHING: Final = LaunchSequence()


class _Kernels(NamedTuple):
    """Of one slot of either direction."""

    complete: LinearGraph  # of one kernel, which by itself costs the host more to launch
    begin: Launch
    send: Launch


class _Graphs(NamedTuple):
    """Of one slot: ``begin``, stage B and ``send``, cut in two where the policy is reset."""

    first: LinearGraph | None
    rest: LinearGraph


class StageStamps(StageMoments):
    """As ``StageMoments``, of a slot's stamps."""

    words: memoryview  # the three of the slot

    @classmethod
    def of(cls, slots: SlotWords, number: int) -> StageStamps:
        stamps = cls(*(slots.stamp(number, at) for at in (_COMPLETE, _B0, _B1)))
        begin = number * slots.width
        stamps.words = slots.words[begin + _COMPLETE : begin + _B1 + 1]
        return stamps

    def ns_since(self, earlier: DeviceStamp) -> Sequence[int]:
        """As ``StageMoments``."""
        base_ns = earlier.ns
        return [ns - base_ns for ns in self.words]


class HeldStageB:
    """A stage B that is a part of graphs: the policy's ``reset`` alone is left to call."""

    def __init__(self, stage_b: DeviceStageB) -> None:
        self._stage_b = stage_b

    def __call__(self, *_: object) -> None:
        """The slot's graphs do the rest. Raises what the policy raises."""
        self._stage_b.reset()

    def instruct(self, number: int, text: str) -> str:
        """As ``DeviceStageB``."""
        return self._stage_b.instruct(number, text)


class StampedHop:
    """A ``CountedLink`` as the policy rank's loop queues it (device_link.DeviceLink).

    Args:
        link: with stamps.
        b: stage B's stream.
    """

    is_short = True
    spins = True

    def __init__(self, link: CountedLink, b: CudaStream) -> None:
        self.name, self.out, self.into = link.name, link.out, link.into
        self.sending, self.receiving, self.note_bytes = link.sending, link.receiving, 0
        self._link, self._b = link, b
        self._slots = SlotWords(len(link.into), _WIDTH)
        self._kernels = [self._of(number) for number in range(len(link.into))]
        self._graphs: list[_Graphs] = []  # of each slot; empty: stage B is calls
        self._failed = False  # what is sent next

    def stamped(self, plans: Sequence[SlotPlan]) -> tuple[SlotPlan, ...]:
        """Returns plans of each slot, with stamps in place of events."""
        return tuple(self._stamped(number, plan) for number, plan in enumerate(plans))

    def hold(self, stage_b: DeviceStageB) -> int:
        """Make the graphs of each slot, if ``stage_b`` is made of some; returns of how many slots.

        From then on waiting for an envelope and sending its result queue its stage B, too.
        """
        graphs = []
        for envelope, result, kernels in zip(self.into, self.out, self._kernels, strict=True):
            found = stage_b.graphs(envelope, result)
            if found is None:
                return 0
            if found.find_new is None:
                whole = LinearGraph((kernels.begin, *found.rest, kernels.send))
                graphs.append(_Graphs(None, whole))
            else:
                first = LinearGraph((kernels.begin, found.find_new))
                graphs.append(_Graphs(first, LinearGraph((*found.rest, kernels.send))))
        self._graphs = graphs
        return len(graphs)

    def queue_receive(self, index: int, stream: CudaStream | None = None) -> None:
        """As ``DeviceLink``, on ``receiving``; the plan's ``behind_receipt`` stamps it."""
        assert stream is None, "the stage's own wait is queued by queue_wait"
        self._link.queue_receive(index)
        number, count = index % len(self._kernels), self._link.count_of(index)
        self._slots.write(number, _COMPLETE, 0, 0, 0, 0, count)  # whoever stamps is queued later

    def queue_wait(self, index: int, stream: CudaStream) -> bool:
        """As ``DeviceLink``, on stage B's stream."""
        number = index % len(self._kernels)
        first = self._graphs[number].first if self._graphs else self._kernels[number].begin
        if first is not None:
            first.queue(stream.handle)
        return True

    def queue_header(self, index: int, numbers: Sequence[int]) -> None:
        """As ``DeviceLink``; of the next slot, once."""
        number = index % len(self._kernels)
        self._slots.write(number, _SEND, *self._link.message_of(index, numbers))
        self._failed = numbers[FAILED - EPOCH] != 0

    def queue_send(self, index: int, stream: CudaStream | None = None) -> None:
        """As ``DeviceLink``, on stage B's stream; its header was queued."""
        number = index % len(self._kernels)
        alone = self._failed or not self._graphs  # what failed in its ``reset`` is not called
        send = self._kernels[number].send if alone else self._graphs[number].rest
        send.queue(self._b.handle)

    def queue_note(self) -> None:
        """As ``DeviceLink``."""
        self._link.queue_note()

    def queue_note_receipt(self) -> None:
        """As ``DeviceLink``."""
        self._link.queue_note_receipt()

    def close(self) -> bool:
        """As ``DeviceLink``."""
        return self._link.close()

    def _of(self, number: int) -> _Kernels:
        link, b = self._link, self._b

        def at(word: int) -> int:
            return self._slots.address(number, word)

        named = link.into[number].address, HEADER_WORDS
        stamps = Stamps(at(_SEND), at(_B1), at(_LAST), at(_NAMES), *named)
        complete = link.stamped_wait(link.receiving, at(_WAIT), at(_COMPLETE))
        return _Kernels(
            LinearGraph((complete,)),
            link.stamped_wait(b, at(_WAIT), at(_B0)),
            link.stamped_send(number, b, stamps),
        )

    def _stamped(self, number: int, plan: SlotPlan) -> SlotPlan:
        stamp: Any = self._slots.stamp
        begin = number * _WIDTH + _NAMES
        last = stamp(number, _LAST)
        complete, handle = self._kernels[number].complete, self.receiving.handle

        def queue() -> tuple[int]:
            complete.queue(handle)
            return (0,)

        return plan._replace(
            header=np.frombuffer(self._slots.words[begin : begin + HEADER_WORDS], np.int64),
            complete=stamp(number, _COMPLETE),
            named=last,
            moments=StageStamps.of(self._slots, number),
            last=last,
            behind_receipt=plan.behind_receipt.then(DriverCall(queue, "a stamp")),
            before_b=_NOTHING,
            behind_b=_NOTHING,
            behind_send=_NOTHING,
        )
