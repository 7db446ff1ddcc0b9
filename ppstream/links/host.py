"""The ``host`` link: slots in shared memory, and in front of them the doorbell (``doorbell.py``).

The memory has no name and is passed as a descriptor, so a kill leaves nothing behind; it is sized
before it is used and sealed, so neither end can be hit by SIGBUS later. Nothing is copied. Linux
grants shared memory first and kills processes later: the link asks beforehand how much it may take
and refuses with a configuration error.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, PeerLostError, ProtocolError
from ppstream.core.host_memory import available_bytes
from ppstream.links.doorbell import Doorbell, doorbell_bytes
from ppstream.links.protocol import Hops
from ppstream.links.slots import Order, Slot, aligned, make_slots, orders_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.protocol import Neighbours
    from ppstream.links.slots import LinkShape, SlotLayout

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MIB: Final = 1 << 20
LOST_GRACE_NS: Final = NS_PER_S
HOP_FDS: Final = 2  # its memory, and its doorbell's eventfd


class HostOut:
    """The sending end of a hop (``links.protocol.OutHop``)."""

    def __init__(self, peer: Peer, memory: HopMemory, order: Order) -> None:
        self._peer, self._order = peer, order
        self._slots, self._bell = memory

    def slot(self, index: int) -> Slot:
        """As ``OutHop``."""
        return self._slots[index % len(self._slots)]

    def commit(self, index: int) -> None:
        """As ``OutHop``: ring for it."""
        slots = self._slots
        self._order.send(index, slots[index % len(slots)])
        self._bell.ring(index, now_ns(), self._peer.frames_sent)

    def rouse(self) -> None:
        """As ``Hops.rouse``."""
        self._bell.rouse()

    def close(self) -> None:
        """Forget the slots; the memory goes with the last tensor that refers to it."""
        self._slots = ()
        self._bell.close()


class HostIn:
    """The receiving end of a hop (``links.protocol.InHop``)."""

    def __init__(self, peer: Peer, memory: HopMemory, order: Order, *, is_pumped: bool) -> None:
        self._peer, self._order = peer, order
        self._slots, self._bell = memory
        self._is_pumped = is_pumped  # by its owner, too
        self._end_ns: int | None = None  # when the end of a peer that is pumped here was seen

    def register_with(self, waiter: Waiter) -> frozenset[int]:
        """As ``InHop``."""
        waiter.register_bell(self._bell)
        fds = {self._bell.fileno()}
        if not self._is_pumped:
            waiter.register(self._peer.fileno())
            fds.add(self._peer.fileno())
        return frozenset(fds)

    def unregister_from(self, waiter: Waiter) -> None:
        """As ``InHop``."""
        waiter.unregister_bell(self._bell)
        if not self._is_pumped:
            waiter.unregister(self._peer.fileno())

    def on_ready(self, ready: Sequence[int]) -> None:
        """As ``InHop``."""
        if not self._is_pumped and (not ready or self._peer.fileno() in ready):
            self._pump()

    def receive_nowait(self) -> tuple[int, int] | None:
        """As ``InHop``."""
        if not self._bell.is_rung:
            return None
        if self._bell.frames > self._peer.frames_heard:
            if self._is_pumped:
                self._peer.pump()
                return None
            self._pump()
        index, at_ns = self._bell.pop()
        slots = self._slots
        return self._order.receive(index, slots[index % len(slots)]), at_ns

    def slot(self, index: int) -> Slot:
        """As ``InHop``."""
        return self._slots[index % len(self._slots)]

    def _pump(self) -> None:
        """A neighbour that drained goes first; of one that was lost rank 0 tells in a moment."""
        try:
            if self._end_ns is None:
                self._peer.pump()
        except PeerLostError:
            self._end_ns = now_ns()
        if self._end_ns is not None and now_ns() - self._end_ns > LOST_GRACE_NS:
            self._peer.pump()  # raises the same again

    def close(self) -> None:
        """As ``HostOut``."""
        self._slots = ()
        self._bell.close()


def open_host(ends: Neighbours, shape: LinkShape, timeout_s: float) -> Hops:
    """Both hops of a rank.

    Rank 0 allocates the slots of the first and the last hop; of one between two policy ranks the
    sender does.

    Raises:
        ConfigError: the slots do not fit into memory.
        ProtocolError: the other end's slots are of another size.
    """
    is_front, limit_ns = ends.position.is_front, round(timeout_s * NS_PER_S)
    there, back = (shape.envelope, shape.envelope_slots), (shape.result, shape.result_slots)
    mine, theirs = (there, back) if is_front else (back, there)  # out, into
    fds: list[int] = []  # of the hop that leads out, then of the one that leads in
    try:
        if is_front:
            fds += _make(mine)
            fds += _make(theirs)
            if ends.before is ends.behind:
                ends.behind.send_fds(fds)
            else:
                ends.behind.send_fds(fds[:HOP_FDS])
                ends.before.send_fds(fds[HOP_FDS:])
        elif ends.before is ends.behind:
            received = ends.before.receive_fds(2 * HOP_FDS, limit_ns)
            fds += received[HOP_FDS:] + received[:HOP_FDS]
        else:
            if ends.position.place == ends.position.places:
                fds += ends.behind.receive_fds(HOP_FDS, limit_ns)
            else:
                fds += _make(mine)
                ends.behind.send_fds(fds)
            fds += ends.before.receive_fds(HOP_FDS, limit_ns)
        memories = [
            _open(memory_fd, bell_fd, hop)
            for memory_fd, bell_fd, hop in zip(fds[::2], fds[1::2], (mine, theirs), strict=True)
        ]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    for fd in fds[::2]:  # the mapping stays; the eventfds are the doorbells'
        os.close(fd)
    out_order, in_order = orders_of(ends.position, shape.generation)
    out = HostOut(ends.behind, memories[0], out_order)
    into = HostIn(ends.before, memories[1], in_order, is_pumped=ends.owner_pumps_before)

    def close() -> None:
        into.close()
        out.close()

    return Hops("host", out, into, close, rouse=out.rouse)


class HopMemory(NamedTuple):
    """Shared memory of a hop, as one end maps it."""

    slots: tuple[Slot, ...]
    bell: Doorbell


def _bytes(hop: tuple[SlotLayout, int]) -> int:
    layout, count = hop
    return aligned(doorbell_bytes(count)) + layout.slot_bytes * count


def _make(hop: tuple[SlotLayout, int]) -> tuple[int, int]:
    """Descriptors of a new hop: its memory and its doorbell's eventfd."""
    memory_fd = _allocate(_bytes(hop))
    try:
        return memory_fd, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    except OSError:
        os.close(memory_fd)
        raise


def _allocate(size: int) -> int:
    """A descriptor of ``size`` bytes of shared memory that exist, and can no longer be resized."""
    # Asked first: the kernel itself answers a request for too much by killing processes.
    available = available_bytes()
    if size > available:
        raise ConfigError([_too_large(size, f"{available / MIB:.0f} MiB are available")])
    fd = os.memfd_create("ppstream-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise ConfigError([_too_large(size, str(error))]) from error
    return fd


def _too_large(size: int, why: str) -> str:
    return (
        f"link: the slots need {size / MIB:.1f} MiB of shared memory, {why}; "
        "lower pipeline.d_in, pipeline.d_out, batch.rows or the window, or allow more memory"
    )


def _open(memory_fd: int, bell_fd: int, hop: tuple[SlotLayout, int]) -> HopMemory:
    """Map a hop's memory; its doorbell owns ``bell_fd`` from now on."""
    (layout, count), wanted = hop, _bytes(hop)
    size = os.fstat(memory_fd).st_size
    if size != wanted:
        raise ProtocolError(
            f"a hop's memory is {size} bytes, this rank's layout has {wanted}: the ranks "
            "disagree on the policy's tensors or the queue bounds"
        )
    # numpy holds the mapping's buffer for as long as any view lives; torch.frombuffer would not.
    shared = mmap.mmap(memory_fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    behind_bell = np.frombuffer(shared, np.uint8, offset=aligned(doorbell_bytes(count)))
    slots = torch.from_numpy(behind_bell)
    return HopMemory(make_slots(slots, layout, count), Doorbell(shared, count, bell_fd))
