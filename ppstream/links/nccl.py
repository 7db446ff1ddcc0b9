"""The ``nccl`` link: GPUs of any topology, over NCCL's send and receive.

Each direction has a communicator of its own: one for both would serialise them, and can block both
ends. A large receive that stands posted slows the policy beside it (kernels spin for it), a small
one does not: so a note goes before every slot of more than ``PARKED_BYTES``, and the receive of the
slot begins on the device once the note is there. A send that has completed says nothing about the
peer; results do.

NCCL reports no dead peer, and its time-out is no detector: a receive stands posted for as long as
the robots rest. Both are told so:

* the groups' time-out is a year;
* ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``: should it pass all the same, torch only says so, where its
  default aborts the communicator and ends the process, untyped;
* ``TORCH_NCCL_DUMP_ON_TIMEOUT=0``, ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=0``: torch would hold up
  every further call of a group that timed out for a minute, four times the default, so that ranks
  can write what they were at; here ``nccl_dump.py`` does, when a rank ends;
* ``TORCH_NCCL_BLOCKING_WAIT=0``: with 1, as some launchers set it, a wait would hold up the host;
* ``TORCH_NCCL_ENABLE_MONITORING=0``: torch's monitor ends a process whose watching thread stands
  still, as it does behind a driver call that waits; ``watchdog.py`` decides that here;
* ``NCCL_NVLS_ENABLE=0``: multicast is of no use to two ranks;
* ``TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING=0``: torch warns that messages of one group
  wait for each other, and advises a group for each direction, as there is.

They are set whatever the environment says, for every NCCL group of a rank (``settle``). The
control socket's owner calls ``close``, which aborts both communicators at the same time: giving up
one waits for the whole device, and so for kernels of the other, which nobody answers any more. An
end whose peer was quicker may have torch print ``raised the following async exception``: it looks
every 100 ms whether what it sent is over, and a communicator broken by its peer looks the same at a
close as at a crash.

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

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError, ProtocolError
from ppstream.cuda.streams import stream as own_stream
from ppstream.links import nccl_dump
from ppstream.links.device_link import Headers, layouts, new_device_slots, slot_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from ppstream.cuda.driver import CudaStream
    from ppstream.links.slots import LinkShape, Position

SETTINGS: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
FOR_EVER: Final = timedelta(days=365)
#: Of both aborts; each takes some 0.5 s. Rank 0 ends a policy rank that takes 2 s to leave.
ABORT_LIMIT_S: Final = 1.0
PARKED_BYTES: Final = 4096  # a receive of 1 KB was seen to cost nothing, one of 256 KB 55 %
NOTE_VALUES: Final = 16  # int64: small enough to be eager
SENDER, RECEIVER = 0, 1  # of a hop's group

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class NcclLink:
    """Both hops of a rank (device_link.DeviceLink); all ranks must open them at the same time.

    Args:
        position: of this rank.
        store: the launcher's, as torch knows it; its time-out becomes this one.
        shape: of both hops.
        device: of this rank; current, and CUDA has started.
        timeout_s: bound of the neighbours' coming.
        group_timeout: of both communicators; nothing depends on it.

    Raises:
        PeerLostError: a neighbour did not open its end in time.
    """

    name = "nccl"
    is_short = False  # a send ends when it was received
    spins = False

    def __init__(
        self,
        position: Position,
        store: Store,
        shape: LinkShape,
        device: torch.device,
        timeout_s: float,
        *,
        group_timeout: timedelta = FOR_EVER,
    ) -> None:
        count = slot_count(shape)
        out, into = layouts(shape, position)
        self.out = new_device_slots(out, count, device)
        self.into = new_device_slots(into, count, device)
        self._headers = Headers(out, count, shape.generation)
        self._notes = [torch.zeros(NOTE_VALUES, dtype=torch.int64, device=device) for _ in "io"]
        self.note_bytes = self._notes[0].nbytes
        self.sending, self.receiving = own_stream("sending"), own_stream("receiving")
        self._as_torch: dict[int, Any] = {}
        self._device = device
        place, places = position
        ranks = {place: SENDER, (place - 1) % (places + 1): RECEIVER}  # of the hops by number
        groups = {
            hop: open_group(store, f"hop {hop}", ranks[hop], group_timeout) for hop in sorted(ranks)
        }
        self._outgoing, self._incoming = (groups[hop] for hop in ranks)
        self._sent = self._expected = 0
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            for group in groups.values():  # in one order on all ranks: each waits for its other end
                group.eager_connect_single_device(self.out[0].raw.device)
            self._connect(first=position.is_front)
        except dist.DistError as error:
            raise PeerLostError(f"link nccl: a neighbour did not connect: {error}") from error

    def queue_header(self, index: int, numbers: Sequence[int]) -> None:
        header, size = self._headers.write(index, numbers)
        self.sending.copy(self.out[index % len(self.out)].address, header, size)

    def queue_send(self, index: int, stream: CudaStream | None = None) -> None:
        if index != self._sent:
            raise ProtocolError(f"slot {index} was to be sent, {self._sent} is due")
        self._sent += 1
        slot = self.out[index % len(self.out)]
        with self._on(self.sending if stream is None else stream):
            if slot.size > PARKED_BYTES:
                self._send(self._notes[0])
            self._send(slot.raw)

    def queue_receive(self, index: int, stream: CudaStream | None = None) -> None:
        if index != self._expected:
            raise ProtocolError(f"slot {index} was to be received, {self._expected} is due")
        self._expected += 1
        slot = self.into[index % len(self.into)]
        with self._on(self.receiving if stream is None else stream):
            if slot.size > PARKED_BYTES:
                self._receive(self._notes[1])
            self._receive(slot.raw)

    def queue_wait(self, index: int, stream: CudaStream) -> bool:
        return False  # what has arrived is the group's to know

    def queue_note(self) -> None:
        with self._on(self.receiving):
            self._send(self._notes[0])

    def queue_note_receipt(self) -> None:
        with self._on(self.receiving):
            self._receive(self._notes[1])

    def close(self) -> bool:
        """Abort both communicators: what waits for the peer ends, undone."""
        groups = self._incoming, self._outgoing
        aborts = [threading.Thread(target=group.abort, daemon=True) for group in groups]
        for abort in aborts:
            abort.start()
        until_ns = now_ns() + round(ABORT_LIMIT_S * NS_PER_S)
        for abort in aborts:
            abort.join(max(0, until_ns - now_ns()) / NS_PER_S)
        return not any(abort.is_alive() for abort in aborts)

    def _on(self, stream: CudaStream) -> Any:
        """A context in which torch queues on ``stream``."""
        handle = int(stream.handle)
        if handle not in self._as_torch:
            self._as_torch[handle] = _cuda.ExternalStream(handle, self._device)
        return _cuda.stream(self._as_torch[handle])

    def _connect(self, *, first: bool) -> None:
        """Join both directions, in one order: a communicator's first call waits for the peer.

        What they carry is received before anything else is queued: ``latency_probe.py`` waits for
        the notes behind it.
        """
        for is_sending in (first, not first):
            with self._on(self.receiving):
                if is_sending:
                    self._send(self._notes[0])
                    self._send(self.out[0].raw)
                else:
                    self._receive(self._notes[1])
                    self._receive(self.into[0].raw)

    def _send(self, tensor: Tensor) -> None:
        self._outgoing.send([tensor], RECEIVER, 0).wait()

    def _receive(self, tensor: Tensor) -> None:
        self._incoming.recv([tensor], SENDER, 0).wait()


def settle() -> None:
    """Has no NCCL group end, or hold up, a rank by itself; before the first one is made."""
    os.environ.update(SETTINGS)
    nccl_dump.switch_on()


def open_group(store: Store, name: str, rank: int, timeout: timedelta) -> Any:
    """Returns torch's group of two ranks, which is not connected yet.

    Args:
        store: where the ranks meet.
        name: of the group, the same on both.
        rank: ``SENDER`` or ``RECEIVER``.
        timeout: of its operations.
    """
    settle()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    prefixed = dist.PrefixStore(f"nccl/{name}", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupNCCL(prefixed, rank, 2, options)
