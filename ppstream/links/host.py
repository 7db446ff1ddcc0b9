"""The ``host`` link: slots in shared memory, the doorbell a frame on the control socket.

The memory has no name and is passed as a descriptor, so a kill leaves nothing behind; it is sized
before it is used and sealed, so neither end can be hit by SIGBUS later. Nothing is copied. Linux
grants shared memory first and kills processes later: the link asks beforehand how much it may take
and refuses with a configuration error.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, PeerLostError, ProtocolError
from ppstream.links.arrivals import SocketArrivals
from ppstream.links.protocol import Hops
from ppstream.links.slots import Order, Slot, make_slots, orders_of

if TYPE_CHECKING:
    from ppstream.control.peer import Peer
    from ppstream.links.protocol import Neighbours
    from ppstream.links.slots import LinkShape, SlotLayout

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MIB: Final = 1 << 20
CGROUPS: Final = Path("/sys/fs/cgroup")
V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2: Final = ("memory.max", "memory.current", "inactive_file")
KIB: Final = 1024
LOST_GRACE_NS: Final = NS_PER_S


def available_bytes() -> int:
    """The least of what the machine has available and what each control group above us allows."""
    return min(_machine_bytes(), *map(_group_bytes, _groups()))


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * KIB
    raise OSError("/proc/meminfo has no MemAvailable: Linux 3.14 or newer is needed")


def _groups() -> list[Path]:
    """Directories of our control groups, up to the roots; in a container the roots are its own."""
    groups = [CGROUPS, CGROUPS / "memory"]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            parts = Path(path.lstrip("/")).parts
            groups += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return groups


def _group_bytes(group: Path) -> int:
    """Returns the bytes that ``group`` may still take; droppable page cache is free."""
    for limit, usage, droppable in (V2, V1):
        try:
            allowed = int((group / limit).read_text())
            taken = int((group / usage).read_text())
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        except (OSError, ValueError):  # no such group, no such version, or "max"
            continue
        return max(0, allowed - taken + int(statistics.get(droppable, 0)))
    return 1 << 63


class HostOut:
    """The sending end of a hop (``links.protocol.OutHop``)."""

    def __init__(self, peer: Peer, slots: tuple[Slot, ...], order: Order) -> None:
        self._peer, self._slots, self._order = peer, slots, order

    def slot(self, index: int) -> Slot:
        """As ``OutHop``."""
        return self._slots[index % len(self._slots)]

    def commit(self, index: int) -> None:
        """As ``OutHop``: ring for it."""
        self._order.send(index, self.slot(index))
        self._peer.ring(index)

    def close(self) -> None:
        """Forget the slots; the memory goes with the last tensor that refers to it."""
        self._slots = ()


class HostIn:
    """The receiving end of a hop (``links.protocol.InHop``)."""

    fds: tuple[int, ...] = ()

    def __init__(
        self, peer: Peer, slots: tuple[Slot, ...], order: Order, *, is_pumped: bool
    ) -> None:
        self._peer, self._slots, self._order = peer, slots, order
        self._is_pumped = is_pumped  # by its owner
        self._end_ns: int | None = None  # when the end of a peer that is pumped here was seen
        if not is_pumped:
            self.fds = (peer.fileno(),)
        self._arrivals: SocketArrivals | None = None

    @property
    def arrivals(self) -> SocketArrivals:
        """As ``InHop``."""
        if self._arrivals is None:
            peer = self._peer
            self._arrivals = SocketArrivals(peer.fileno(), lambda: peer.bytes_read)
        return self._arrivals

    def receive_nowait(self) -> int | None:
        """As ``InHop``: whose doorbell the peer's pump has heard."""
        if not self._is_pumped:
            self._pump()
        if not self._peer.bells:
            return None
        index = self._peer.bells.popleft()
        return self._order.receive(index, self.slot(index))

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
        if self._arrivals is not None:
            self._arrivals.close()
        self._slots = ()


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
    fds: list[int] = []
    try:
        if is_front:
            fds += (_allocate(_bytes(mine)), _allocate(_bytes(theirs)))
            if ends.before is ends.behind:
                ends.behind.send_fds(fds)
            else:
                ends.behind.send_fds(fds[:1])
                ends.before.send_fds(fds[1:])
        elif ends.before is ends.behind:
            fds += reversed(ends.before.receive_fds(2, limit_ns))
        else:
            if ends.position.place == ends.position.places:
                fds += ends.behind.receive_fds(1, limit_ns)
            else:
                fds.append(_allocate(_bytes(mine)))
                ends.behind.send_fds(fds)
            fds += ends.before.receive_fds(1, limit_ns)
        slots = [_map(fd, *hop) for fd, hop in zip(fds, (mine, theirs), strict=True)]
    finally:
        for fd in fds:
            os.close(fd)
    out_order, in_order = orders_of(ends, shape.generation)
    out = HostOut(ends.behind, slots[0], out_order)
    is_from_rank0 = ends.position.place <= 1
    into = HostIn(ends.before, slots[1], in_order, is_pumped=is_from_rank0)

    def close() -> None:
        into.close()
        out.close()

    return Hops("host", out, into, close)


def _bytes(hop: tuple[SlotLayout, int]) -> int:
    layout, count = hop
    return layout.slot_bytes * count


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


def _map(fd: int, layout: SlotLayout, count: int) -> tuple[Slot, ...]:
    size, wanted = os.fstat(fd).st_size, _bytes((layout, count))
    if size != wanted:
        raise ProtocolError(
            f"the slots of a hop are {size} bytes, this rank's layout has {wanted}: the ranks "
            "disagree on the policy's tensors or the queue bounds"
        )
    # numpy holds the mapping's buffer for as long as any view lives; torch.frombuffer would not.
    shared = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return make_slots(torch.from_numpy(np.frombuffer(shared, dtype=np.uint8)), layout, count)
