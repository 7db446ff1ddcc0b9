"""The ``gloo`` link: CPU tensors over TCP, each hop in its own process group.

A gloo receive has to be posted before its sender can finish and says nothing until somebody waits
for it, so one thread per end keeps one posted and waits; what arrived is handed over with an
eventfd. Liveness is the control socket's business: no time-out of a group is ever used for it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError
from ppstream.links.protocol import Hops
from ppstream.links.slots import INDEX, LinkShape, Order, Slot, new_slots, orders_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.protocol import Neighbours
    from ppstream.links.slots import SlotLayout

SENDER, RECEIVER = 0, 1  # inside each group
FOR_EVER: Final = timedelta(days=365)  # a wait that runs out would close the connection for good
END: Final = -1  # index of the note that says no more will come
NOTE_BYTES: Final = 64  # gloo accepts less than what was posted
CLOSE_LIMIT_NS: Final = NS_PER_S  # from a rank's END to its leaving, whoever does not answer
LEAST_WAIT: Final = timedelta(milliseconds=1)  # gloo takes 0 for no limit
#: One slot more than credits need: the END note overwrites no slot that is still being read.
SPARE_SLOTS: Final = 1


def open_gloo(ends: Neighbours, store: Store, shape: LinkShape, timeout_s: float) -> Hops:
    """Both hops of a rank; all ranks open theirs in the order of the chain.

    Raises:
        PeerLostError: a neighbour did not open its end within ``timeout_s``.
    """
    there, back = (shape.envelope, shape.envelope_slots), (shape.result, shape.result_slots)
    out_order, in_order = orders_of(ends.position, shape.generation)
    place, places = ends.position
    if ends.position.is_front:
        leads_out = open_group(ends.behind, store, 0, SENDER, timeout_s)
        leads_in = open_group(ends.before, store, places, RECEIVER, timeout_s)
        out = GlooOut(leads_out, RECEIVER, *there, out_order)
        layout = back
    else:
        leads_in = open_group(ends.before, store, place - 1, RECEIVER, timeout_s)
        leads_out = open_group(ends.behind, store, place, SENDER, timeout_s)
        out = GlooOut(leads_out, RECEIVER, *back, out_order)
        layout = there
    pumped = ends.before if ends.owner_pumps_before else None
    into = GlooIn(leads_in, SENDER, *layout, in_order, out, pumped)

    def close() -> None:
        """Tell the peers that nothing more will come, and wait a second for their answers.

        One that is lost by its silence is not waited for; of one that has died the connection
        breaks by itself. Only a stopped peer does not answer: the receiving thread then stays
        behind, and the process has to leave with ``os._exit``.
        """
        out.end()
        into.close(_until_ns(out, ends.before))
        out.close(_until_ns(out, ends.behind))

    return Hops("gloo", out, into, close, out.end)


def _until_ns(out: GlooOut, peer: Peer) -> int:
    """The instant from which nobody waits for the end of a hop to ``peer``."""
    is_silent = peer.lost_ns is not None and not peer.has_ended
    return out.ended_ns if is_silent else out.close_by_ns


class Group(Protocol):
    """A process group, as far as it is used."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...


def open_group(
    peer: Peer, store: Store, name: int | str, rank: int, timeout_s: float, size: int = 2
) -> Group:
    """The group of the two ends of a hop, or of a mesh, on the control socket's interface.

    Raises:
        PeerLostError: another rank did not come within ``timeout_s``.
    """
    gloo: Any = dist.ProcessGroupGloo  # its type stubs lack what is used here
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=peer.local_host or "127.0.0.1")]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    try:
        prefixed = dist.PrefixStore(f"link/{name}", store)  # type: ignore[attr-defined]
        group: Group = gloo(prefixed, rank, size, options)
    except RuntimeError as error:
        raise PeerLostError(
            f"{peer.name} did not open its end of the link within {timeout_s:.1f} s: {error}"
        ) from error
    return group


class Answers(Protocol):
    """The way back of a hop, which answers its END."""

    def end(self) -> None: ...


class GlooOut:
    """The sending end of a hop (``links.protocol.OutHop``).

    Attributes:
        ended_ns: when the END note was sent, or could not be; 0: not yet.
    """

    def __init__(self, group: Group, to: int, layout: SlotLayout, count: int, order: Order) -> None:
        self.ended_ns = 0
        self._order = order
        self._group: Group | None = group
        self._to = to
        self._slots = new_slots(layout, count)
        self._sends: list[tuple[int, Work] | None] = [None] * count
        self._note: Tensor | None = None  # set: the END note was sent; gloo reads it until then
        self._noted: Work | None = None
        self._lock = threading.Lock()  # the receiving thread answers the peer's END

    def slot(self, index: int) -> Slot:
        """As ``OutHop``: its earlier send has long arrived, waiting only tells gloo."""
        at = index % len(self._slots)
        pending = self._sends[at]
        if pending is not None and pending[0] < index:
            try:
                pending[1].wait()
            except RuntimeError as error:
                raise _broke(error) from error
            self._sends[at] = None
        return self._slots[at]

    def commit(self, index: int) -> None:
        """As ``OutHop``."""
        at = index % len(self._slots)
        self._order.send(index, self.slot(index))
        with self._lock:
            if self._note is not None or self._group is None:
                raise PeerLostError("the link was closed: nothing can be sent")
            try:
                self._sends[at] = (index, self._group.send([self._slots[at].raw], self._to, 0))
            except RuntimeError as error:
                raise _broke(error) from error

    @property
    def close_by_ns(self) -> int:
        """The instant from which nobody's answer is waited for."""
        return self.ended_ns + CLOSE_LIMIT_NS

    def end(self) -> None:
        """Send the END note, once."""
        with self._lock:
            if self._note is not None or self._group is None:
                return
            self.ended_ns = now_ns()
            self._note = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
            self._note.view(torch.int64)[INDEX] = END
            with suppress(RuntimeError):  # then there is nobody to tell
                self._noted = self._group.send([self._note], self._to, 0)

    def close(self, until_ns: int) -> None:
        """Let go, at ``until_ns`` at the latest: when the peer has the END note."""
        if self._noted is not None and (left := _left(until_ns)) > LEAST_WAIT:
            with suppress(RuntimeError):
                self._noted.wait(left)
        self._noted = self._group = None
        self._sends = [None] * len(self._slots)


class GlooIn:
    """The receiving end of a hop (``links.protocol.InHop``), with the thread that fills it.

    ``room`` is taken for each slot before it is filled, and given back by the owner; without it
    credits alone say that a slot is free.
    """

    def __init__(
        self,
        group: Group,
        source: int,
        layout: SlotLayout,
        count: int,
        order: Order,
        answer: Answers,
        peer: Peer | None,
        room: threading.Semaphore | None = None,
    ) -> None:
        self._order = order
        self._peer = peer  # whose frames the owner of this hop takes, too
        self._room = room
        self._slots = new_slots(layout, count + SPARE_SLOTS)
        self._arrived: deque[tuple[int, int]] = deque()
        self._broken: str | None = None
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(group, source, answer), name="gloo-receive", daemon=True
        )
        self._thread.start()

    def slot(self, index: int) -> Slot:
        """As ``InHop``."""
        return self._slots[index % len(self._slots)]

    def register_with(self, waiter: Waiter) -> frozenset[int]:
        """As ``InHop``."""
        waiter.register(self._fd)
        return frozenset((self._fd,))

    def unregister_from(self, waiter: Waiter) -> None:
        """As ``InHop``."""
        waiter.unregister(self._fd)

    def on_ready(self, ready: Sequence[int]) -> None:
        """As ``InHop``: the look itself takes back the signal."""

    def receive_nowait(self) -> tuple[int, int] | None:
        """As ``InHop``; an empty look also takes back the eventfd's signal."""
        if not self._arrived:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return None
            if not self._arrived:
                if self._broken is not None:
                    raise PeerLostError(f"the link's connection broke: {self._broken}")
                return None
        if self._peer is not None:
            self._peer.pump()
            if self._peer.inbox:
                return None
        index, at_ns = self._arrived.popleft()
        return self._order.receive(index, self.slot(index)), at_ns

    def close(self, until_ns: int) -> None:
        """Let go, at ``until_ns`` at the latest: when the peer's END note is here."""
        self._thread.join(_left(until_ns).total_seconds())
        with self._closing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _run(self, group: Group, source: int, answer: Answers) -> None:
        index = 0
        while True:
            if self._room is not None:
                self._room.acquire()
            slot = self.slot(index)
            try:
                group.recv([slot.raw], source, 0).wait(FOR_EVER)
            except RuntimeError as error:
                self._broken = str(error).splitlines()[0]
                self._signal()
                return
            if slot.header[INDEX] == END:
                answer.end()
                return
            self._arrived.append((index, now_ns()))
            self._signal()
            index += 1

    def _signal(self) -> None:
        with self._closing:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)


def _left(until_ns: int) -> timedelta:
    return timedelta(seconds=max(0, until_ns - now_ns()) / NS_PER_S)


def _broke(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"the link's connection broke: {str(error).splitlines()[0]}")
