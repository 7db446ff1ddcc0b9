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

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError, ProtocolError
from ppstream.links.arrivals import SocketArrivals
from ppstream.links.protocol import Hops
from ppstream.links.slots import FRONT, LinkShape, Order, Slot, make_slots

if TYPE_CHECKING:
    from ppstream.control.peer import Peer

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MIB: Final = 1 << 20
CGROUPS: Final = Path("/sys/fs/cgroup")
V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2: Final = ("memory.max", "memory.current", "inactive_file")
KIB: Final = 1024


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

    def __init__(self, peer: Peer, slots: tuple[Slot, ...], order: Order) -> None:
        self._peer, self._slots, self._order = peer, slots, order
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
        if not self._peer.bells:
            return None
        index = self._peer.bells.popleft()
        return self._order.receive(index, self.slot(index))

    def slot(self, index: int) -> Slot:
        """As ``InHop``."""
        return self._slots[index % len(self._slots)]

    def close(self) -> None:
        """As ``HostOut``."""
        if self._arrivals is not None:
            self._arrivals.close()
        self._slots = ()


def open_host(side: str, peer: Peer, shape: LinkShape, timeout_s: float) -> Hops:
    """Both hops of ``side``: rank 0 allocates the slots and passes them to the policy rank.

    Raises:
        ConfigError: the slots do not fit into memory.
        ProtocolError: rank 0's slots are of another size.
    """
    fd = _allocate(_bytes(shape)) if side == FRONT else _receive(peer, shape, timeout_s)
    try:
        slots = _map(fd, shape)
        if side == FRONT:
            peer.send_fds([fd])
    finally:
        os.close(fd)
    orders = [Order(what, shape.generation) for what in ("envelope", "result")]
    sends, receives = (0, 1) if side == FRONT else (1, 0)
    out = HostOut(peer, slots[sends], orders[sends])
    into = HostIn(peer, slots[receives], orders[receives])

    def close() -> None:
        into.close()
        out.close()

    return Hops("host", out, into, close)


def _receive(peer: Peer, shape: LinkShape, timeout_s: float) -> int:
    (fd,) = peer.receive_fds(1, round(timeout_s * NS_PER_S))
    size = os.fstat(fd).st_size
    if size != _bytes(shape):
        os.close(fd)
        raise ProtocolError(
            f"rank 0's slots are {size} bytes, this rank's layout has {_bytes(shape)}: "
            "the ranks disagree on the policy's tensors or the queue bounds"
        )
    return fd


def _bytes(shape: LinkShape) -> int:
    return (
        shape.envelope_slots * shape.envelope.slot_bytes
        + shape.result_slots * shape.result.slot_bytes
    )


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


def _map(fd: int, shape: LinkShape) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    # numpy holds the mapping's buffer for as long as any view lives; torch.frombuffer would not.
    shared = mmap.mmap(fd, _bytes(shape), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    memory = torch.from_numpy(np.frombuffer(shared, dtype=np.uint8))
    envelopes = make_slots(memory, shape.envelope, shape.envelope_slots)
    behind = shape.envelope_slots * shape.envelope.slot_bytes
    return envelopes, make_slots(memory[behind:], shape.result, shape.result_slots)
