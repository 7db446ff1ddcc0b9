"""Latency of the hops between GPUs: notes sent round the chain of ranks while it opens.

They are queued ahead, in one stream of each rank: a host is on the path only where it cannot keep
up, as with ``nccl``. One way is a round trip by the clock of one device, shared by the hops.
Devices and wires that were idle take a while to wake up, so the quickest of several rounds counts.
It says what a hand-off costs at least: a slot takes longer by its size, and a stage adds the hop
from its stream to the link's.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError
from ppstream.cuda.driver import CudaEvent

if TYPE_CHECKING:
    from ppstream.links.device_link import DeviceLink
    from ppstream.links.slots import Position

ROUNDS: Final = 8
TRIPS: Final = 30  # of a round
SKIPPED: Final = 4  # of them: the ends begin at different times
POLL_S: Final = 0.0002


class LinkLatency(NamedTuple):
    """Of a link that was just opened."""

    one_way_ns: int  # of a hop: its share of the median round trip, in the quickest round
    note_bytes: int


def measure(link: DeviceLink, position: Position, timeout_s: float) -> LinkLatency:
    """Measure ``link``, on all ranks at the same time, before its first slot; some ms.

    Raises:
        PeerLostError: not all notes came round within ``timeout_s``; the link is closed.
    """
    events = [CudaEvent() for _ in range(TRIPS)]
    until_ns = now_ns() + round(timeout_s * NS_PER_S)
    rounds_ns = [_round(link, position, events, until_ns) for _ in range(ROUNDS)]
    return LinkLatency(round(min(rounds_ns) / (position.places + 1)), link.note_bytes)


def _round(link: DeviceLink, position: Position, events: list[CudaEvent], until_ns: int) -> float:
    """The median round trip."""
    for event in events:
        if position.is_front:
            link.queue_note()
            link.queue_note_receipt()
        else:
            link.queue_note_receipt()
            link.queue_note()
        link.receiving.record(event)
    while not events[-1].is_done():
        if now_ns() > until_ns:
            link.close()
            raise PeerLostError(f"link {link.name}: the other ranks forward no probe messages")
        time.sleep(POLL_S)
    times_ns = [event.ns_since(events[SKIPPED]) or 0 for event in events[SKIPPED:]]  # all are done
    return statistics.median(later - earlier for earlier, later in pairwise(times_ns))
