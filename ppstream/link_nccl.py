"""The ``nccl`` link: GPUs of any topology, over NCCL's send and receive.

Each direction has a communicator of its own: one for both would serialise them, and can block both
ends. A large receive that stands posted slows the policy beside it (kernels spin for it), a small
one does not: so a note of a few bytes goes first, and the receive of the slot begins on the device
once the note is there. NCCL reports no dead peer and its time-out is no detector: it is set out of
reach, and the control socket's owner calls ``close``, which aborts. A send that has completed says
nothing about the peer either; results do.

It costs the host some 100 µs an envelope, several times the ``peer`` link. It neither encrypts nor
authenticates.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ppstream.cuda_streams import stream, torch_stream
from ppstream.errors import ProtocolError
from ppstream.link_device import FRONT, Headers, layouts, new_device_slots, slot_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from ppstream.slots import LinkShape

FOR_EVER: Final = timedelta(days=365)
ABORT_LIMIT_S: Final = 3.0  # some 0.5 s each
NOTE_VALUES: Final = 16  # int64: small enough to be eager
FRONT_RANK, BACK_RANK = 0, 1

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class NcclLink:
    """One end (link_device.DeviceLink); both ends must be opened at the same time.

    Args:
        side: ``FRONT`` or ``BACK``.
        store: the launcher's, as torch knows it.
        shape: the same on both ends.
        device: of this rank; current, and CUDA has started.
    """

    name = "nccl"

    def __init__(self, side: str, store: Store, shape: LinkShape, device: torch.device) -> None:
        count = slot_count(shape)
        out, into = layouts(shape, side)
        self.out = new_device_slots(out, count, device)
        self.into = new_device_slots(into, count, device)
        self._headers = Headers(out, count, shape.generation)
        self._notes = [torch.zeros(NOTE_VALUES, dtype=torch.int64, device=device) for _ in "io"]
        self.sending, self.receiving = stream("sending"), stream("receiving")
        self._streams = torch_stream("sending"), torch_stream("receiving")
        mine, self._other = (FRONT_RANK, BACK_RANK) if side == FRONT else (BACK_RANK, FRONT_RANK)
        directions = ("in", "out") if side == FRONT else ("out", "in")
        groups = {name: _group(store, name, mine) for name in ("in", "out")}
        self._outgoing, self._incoming = (groups[name] for name in directions)
        self._sent = self._expected = 0
        self._warm(device, first=side == FRONT)

    def queue_header(self, index: int, numbers: Sequence[int]) -> None:
        header, size = self._headers.write(index, numbers)
        self.sending.copy(self.out[index % len(self.out)].address, header, size)

    def queue_send(self, index: int) -> None:
        if index != self._sent:
            raise ProtocolError(f"slot {index} was to be sent, {self._sent} is due")
        self._sent += 1
        with _cuda.stream(self._streams[0]):
            self._send(self._notes[0])
            self._send(self.out[index % len(self.out)].raw)

    def queue_receive(self, index: int) -> None:
        if index != self._expected:
            raise ProtocolError(f"slot {index} was to be received, {self._expected} is due")
        self._expected += 1
        with _cuda.stream(self._streams[1]):
            self._receive(self._notes[1])
            self._receive(self.into[index % len(self.into)].raw)

    def close(self) -> bool:
        """Abort both communicators: what waits for the peer ends, undone."""
        aborting = threading.Thread(target=self._abort, name="abort", daemon=True)
        aborting.start()
        aborting.join(ABORT_LIMIT_S)
        return not aborting.is_alive()

    def _abort(self) -> None:
        for group in (self._incoming, self._outgoing):
            group.abort()

    def _warm(self, device: torch.device, *, first: bool) -> None:
        """Connect both directions: the first receive on a cold communicator blocks the host."""
        slots = self.out[0].raw, self.into[0].raw
        for is_sending in (first, not first):
            if is_sending:
                self._send(self._notes[0])
                self._send(slots[0])
            else:
                self._receive(self._notes[1])
                self._receive(slots[1])
        torch.cuda.synchronize(device)

    def _send(self, tensor: Tensor) -> None:
        self._outgoing.send([tensor], self._other, 0).wait()

    def _receive(self, tensor: Tensor) -> None:
        self._incoming.recv([tensor], self._other, 0).wait()


def _group(store: Store, name: str, rank: int) -> Any:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is of no use to two ranks
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOR_EVER
    prefixed = dist.PrefixStore(f"nccl/{name}", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupNCCL(prefixed, rank, 2, options)
