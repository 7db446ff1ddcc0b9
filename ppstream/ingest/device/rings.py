"""DeviceRings: the rings of all rows on a GPU, kept up to date by copies of what is new.

The host's rings stay as they are, written by one thread. That thread calls ``ingest``: new samples
go to pinned memory, one kernel on a stream of their own reads them there, puts them where they
belong and only then says that a window may use them. Many are copied over first, which is quicker.
Frames go straight from their sender's memory (``sender_memory.py``), or from the host's ring, which
is page-locked in place. Nothing waits: neither the host for the GPU, nor the copies for a window
that stands queued, which therefore finds what is newest when it runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.core.errors import ConfigError
from ppstream.cuda.driver import DeviceError, register_host, unregister_host
from ppstream.cuda.streams import torch_stream
from ppstream.ingest.device.sample_blocks import GUARD, WORD_BYTES, BlockWriter, FramePiece
from ppstream.ingest.device.sender_memory import KeptFrame, KeptFrames, SenderMemories
from ppstream_kernels import cuda_rings
from ppstream_kernels.kernel_launch import KernelLaunch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ppstream.ingest.ring import RingBank
    from ppstream.ingest.rows import RowInput

BLOCKS: Final = 8  # of pinned memory: so many may be on their way
#: Of senders' frames: so many are let go of behind a window, where nobody waits, and not before it.
BRINGING_MAX: Final = 2
IN_PLACE_WORDS: Final = 2048  # of a block, at most, where the kernel reads it in host memory

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class DeviceRing(NamedTuple):
    """One stream's rings on the GPU; ``slots`` is ``GUARD`` times the host's capacity."""

    values: Tensor  # [B, slots, D] float32, of a camera uint8
    stamps_ns: Tensor  # [B, slots] int64


class _Block(NamedTuple):
    """Pinned memory, its twin on the GPU, the kernels that read either, and when one has."""

    pinned: Tensor
    words: NDArray[np.int64]
    device: Tensor
    scatter_in_place: KernelLaunch
    scatter: KernelLaunch
    taken: Any  # an event
    frames: list[KeptFrame]  # that it brings, until it has


class DeviceRings:
    """The rings that windows on ``device`` read; made and used by the thread that owns the input.

    ``tables`` and ``current`` say what a window may use: see ``rings.cu``.

    Args:
        rows: B places of robots; empty, or whatever they hold is sent first.
        banks: the memory of their rings, by stream.
        reference: the stream whose newest stamp ends a window.
        device: a CUDA device.
        commitment: see ``BlockWriter``.

    Raises:
        ConfigError: the frames' memory cannot be page-locked.
    """

    def __init__(
        self,
        rows: Sequence[RowInput],
        banks: Mapping[str, RingBank],
        reference: str,
        device: torch.device,
        commitment: tuple[int, int] | None = None,
    ) -> None:
        self.writer = BlockWriter(rows, banks, reference, commitment)
        self.rings = {name: _ring(bank, device) for name, bank in banks.items()}
        self.tables = torch.zeros(
            cuda_rings.TABLES, self.writer.table_words, dtype=torch.int64, device=device
        )
        self.current = torch.zeros(1, dtype=torch.int64, device=device)
        self.sequence = 0  # of the newest table sent
        self.refused = 0  # times that all blocks were still on their way
        self._banks = list(banks.values())
        locked = [bank.values for bank in self._banks if bank.is_image]
        for values in locked:
            _lock(values)
        self._senders = SenderMemories()
        self._kept = {
            (stream, row): KeptFrames(served.rings[name], self._senders)
            for stream, (name, bank) in enumerate(banks.items())
            for row, served in enumerate(rows if bank.is_image else ())
        }
        self._bringing: deque[_Block] = deque()  # frames of their senders
        self._newest = (None,) * len(rows)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        lanes = cuda_rings.pack_lanes([_lane(ring) for ring in self.rings.values()])
        self._lanes = torch.frombuffer(bytearray(lanes), dtype=torch.uint8).to(device)
        self._stream = torch_stream("ingest")
        self._blocks = [self._block(device) for _ in range(BLOCKS)]
        self._release = weakref.finalize(self, _unlock, self._stream, locked, self._senders)
        self._next = 0
        self._last: torch.cuda.Event | None = None
        self._hold: torch.cuda.Event | None = None
        torch.cuda.synchronize(device)

    def ingest(self, ends_ns: Sequence[int | None] | None = None) -> bool:
        """Send what the rings took in since the last call, and who sits in which row.

        Args:
            ends_ns: where the next window of each row ends, robot clock; None: at the newest
                sample of the reference stream, whenever it runs.

        Returns:
            False: all blocks are on their way, call again. Nothing is lost.
        """
        ends = self._newest if ends_ns is None else ends_ns
        if len(self._bringing) > BRINGING_MAX:
            self.let_go()
        while True:
            block = self._blocks[self._next]
            if not block.taken.query():
                self.refused += 1
                return False
            words, frames, is_all = self.writer.write(block.words, self.sequence + 1, ends)
            if words:
                self.sequence += 1
                self._send(block, words, frames)
                self._next = (self._next + 1) % BLOCKS
            if is_all:
                return True

    def rehearse(self) -> bool:
        """Send the newest samples again: on the GPU nothing changes. Returns as ``ingest``."""
        self.writer.repeat()
        return self.ingest()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream``, which orders all windows, wait until what was sent can be used."""
        if self._last is not None:
            stream.wait_event(self._last)
            self._last = None

    def hold(self, until: torch.cuda.Event) -> None:
        """Send nothing further before ``until``: a window that must not find anything newer."""
        self._hold = until

    def let_go(self) -> None:
        """Leave frames that the GPU has copied to their senders."""
        while self._bringing and self._bringing[0].taken.query():
            self._bringing.popleft().frames.clear()

    def unlock_gone(self) -> None:
        """As ``SenderMemories``."""
        self._senders.unlock_gone()

    def close(self) -> None:
        """Wait for the copies on their way, and unlock the frames' memory; also when collected."""
        self._release()

    def _send(self, block: _Block, words: int, frames: list[FramePiece]) -> None:
        stream = self._stream.cuda_stream
        if self._hold is not None:
            self._stream.wait_event(self._hold)
            self._hold = None
        for frame in frames:
            self._send_frame(frame, stream, block.frames)
        if block.frames:
            self._bringing.append(block)
        if words <= IN_PLACE_WORDS:
            block.scatter_in_place.queue(stream)
        else:
            cuda_rings.copy_to_device(
                block.device.data_ptr(), block.pinned.data_ptr(), words * WORD_BYTES, stream
            )
            block.scatter.queue(stream)
        block.taken.record(self._stream)
        self._last = block.taken

    def _send_frame(self, frame: FramePiece, stream: int, brings: list[KeptFrame]) -> None:
        """Queue the copy; a frame in its sender's memory joins ``brings``."""
        bank = self._banks[frame.stream]
        size_bytes = bank.stream.dim
        slots = GUARD * bank.capacity
        to = frame.row * slots + frame.number % slots
        found = self._kept[frame.stream, frame.row].take(frame.number)
        if found is not None:
            brings.append(found)
            source = found.address
        else:
            at = frame.row * bank.capacity + frame.number % bank.capacity
            source = bank.values.data_ptr() + at * size_bytes
        values = self.rings[bank.stream.name].values
        cuda_rings.copy_to_device(values.data_ptr() + to * size_bytes, source, size_bytes, stream)

    def _block(self, device: torch.device) -> _Block:
        words = self.writer.block_words
        pinned = torch.zeros(words, dtype=torch.int64, pin_memory=True)
        twin = torch.zeros(words, dtype=torch.int64, device=device)
        call = cuda_rings.ScatterCall(
            twin.data_ptr(),
            self._lanes.data_ptr(),
            self.tables.data_ptr(),
            self.current.data_ptr(),
            self._arrived.data_ptr(),
            self.writer.table_words,
        )
        in_place = cuda_rings.scatter(device, call._replace(block=pinned.data_ptr()))
        scatter = cuda_rings.scatter(device, call)
        return _Block(pinned, pinned.numpy(), twin, in_place, scatter, _cuda.Event(), [])


def _ring(bank: RingBank, device: torch.device) -> DeviceRing:
    rows, capacity, dim = bank.values.shape
    slots = GUARD * capacity
    return DeviceRing(
        torch.zeros(rows, slots, dim, dtype=bank.values.dtype, device=device),
        torch.zeros(rows, slots, dtype=torch.int64, device=device),
    )


def _lane(ring: DeviceRing) -> cuda_rings.Lane:
    values = ring.values
    words = values.shape[2] if values.dtype is torch.float32 else 0
    return cuda_rings.Lane(
        values.data_ptr(), ring.stamps_ns.data_ptr(), ring.stamps_ns.shape[1], words
    )


def _unlock(stream: Any, locked: list[Tensor], senders: SenderMemories) -> None:
    """Memory that is freed while it is locked would be refused to its next owner."""
    stream.synchronize()
    senders.close()
    for values in locked:
        unregister_host(values.data_ptr())


def _lock(values: Tensor) -> None:
    try:
        register_host(values.data_ptr(), values.nbytes)
    except DeviceError as error:
        raise ConfigError(
            [
                f"streams: {values.nbytes} bytes of frames cannot be page-locked ({error}); "
                "raise the limit of lockable memory (ulimit -l) or lower max_age_ms or image.frames"
            ]
        ) from error
