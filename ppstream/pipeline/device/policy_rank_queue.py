"""Work that the policy rank queues for one envelope, on three streams, put together once per slot.

The picture stands in ``policy_rank.py``. The policy and the link are not in it: they differ from
one use of a slot to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.cuda.driver import CudaEvent, LaunchSequence
from ppstream.links.device_link import WORD_BYTES
from ppstream.links.headers import EPOCH, FAILED
from ppstream.policy.batch_sizes import PRESENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ppstream.cuda.driver import CudaStream
    from ppstream.links.device_link import DeviceLink, DeviceSlot

_NAMES_AT: Final = EPOCH * WORD_BYTES  # in either header: epoch, seq, failed


class StageMoments(NamedTuple):
    """Moments of one envelope on the policy rank: a ``device_clock.TimedEvents``."""

    complete: Any
    b0: Any
    b1: Any

    def ns_since(self, earlier: Any) -> Sequence[int]:
        """Device times since an event that is done; so are these."""
        return [moment.ns_since(earlier) for moment in self]


class SlotPlan(NamedTuple):
    """One slot of either direction, its events, and what is queued around its envelope's stages.

    Attributes:
        header: of the envelope, in host memory once ``named`` is done. It is copied behind the
            result's send, on the same stream: rank 0 writes this slot again only for an envelope
            whose credit is a result that is sent later.
        present: of the envelope, bool ``[B]`` in host memory once ``complete`` is done; empty where
            nobody asks for it.
        complete: the envelope is there, all of it.
        moments: its times.
        last: the result is sent, or at least behind B on its stream: its slot may be written again.
        carry: behind the result's header, before its send: epoch, seq and ``failed`` of the
            envelope. Nothing with one policy rank: rank 0 knows them.
        carry_fault: the same where B failed here: epoch and seq.
    """

    envelope: DeviceSlot
    result: DeviceSlot
    header: NDArray[np.int64]
    present: NDArray[np.bool]
    complete: CudaEvent
    named: CudaEvent
    moments: StageMoments
    last: CudaEvent
    behind_receipt: LaunchSequence
    before_b: LaunchSequence
    behind_b: LaunchSequence
    behind_send: LaunchSequence
    carry: LaunchSequence
    carry_fault: LaunchSequence


def sends_from_b(link: DeviceLink, d_in: int) -> bool:
    """True when results are sent on stage B's stream.

    Between two stages B a send takes time that only a lone envelope has no other use for.
    """
    return link.is_short and d_in == 1


def slot_plans(
    link: DeviceLink, b: CudaStream, d_in: int, *, relays: bool = False, asks_who: bool = False
) -> tuple[SlotPlan, ...]:
    """One for each slot of ``link``.

    Args:
        link: of the policy rank.
        b: stage B's stream.
        d_in: of the run.
        relays: results carry the names of their envelopes, and the faults of the places before.
        asks_who: ``present`` is copied behind each receipt: some µs of its way.
    """
    is_pinned, slots = torch.cuda.is_available(), len(link.into)
    words = len(link.into[0].header)
    memory = torch.zeros(slots, words, dtype=torch.int64, pin_memory=is_pinned)
    rows = len(link.into[0].tensors[PRESENT]) if asks_who else 0
    present = torch.zeros(slots, rows, dtype=torch.bool, pin_memory=is_pinned and asks_who)
    from_b = sends_from_b(link, d_in)
    return tuple(
        _plan(link, b, slot, *kept, from_b=from_b, relays=relays)
        for slot, kept in enumerate(zip(memory, present, strict=True))
    )


def _plan(
    link: DeviceLink,
    b: CudaStream,
    slot: int,
    header: Any,
    present: Any,
    *,
    from_b: bool,
    relays: bool,
) -> SlotPlan:
    complete, named, b0, b1, sent = (CudaEvent() for _ in range(5))
    envelope, receiving, sending = link.into[slot], link.receiving, link.sending
    result = link.out[slot]
    carries = [
        sending.to_copy(
            result.address + _NAMES_AT, envelope.address + _NAMES_AT, words * WORD_BYTES
        )
        for words in (FAILED + 1 - EPOCH, FAILED - EPOCH)
    ]
    behind_receipt = [receiving.to_record(complete)]
    if present.nbytes:
        there = envelope.tensors[PRESENT].data_ptr()
        behind_receipt.insert(0, receiving.to_copy(present.data_ptr(), there, present.nbytes))
    behind_b = [b.to_record(b1)]
    behind_send = []
    if not from_b:
        behind_b.append(sending.to_wait_for(b1))
        behind_send.append(sending.to_record(sent))
    sends = b if from_b else sending
    behind_send.append(sends.to_copy(header.data_ptr(), envelope.address, header.nbytes))
    behind_send.append(sends.to_record(named))
    return SlotPlan(
        envelope,
        result,
        header.numpy(),
        present.numpy(),
        complete,
        named,
        StageMoments(complete, b0, b1),
        b1 if from_b else sent,
        behind_receipt=LaunchSequence(*behind_receipt),
        before_b=LaunchSequence(b.to_record(b0)),
        behind_b=LaunchSequence(*behind_b),
        behind_send=LaunchSequence(*behind_send),
        carry=LaunchSequence(*carries[:relays]),
        carry_fault=LaunchSequence(*carries[1 : 1 + relays]),
    )
