"""Launches ``rings.cu``, and the driver's calls beside it: no synchronisation, no allocation.

Each launch is made once, with all its addresses, and queued as often as wanted, also into a graph.
Addresses are plain numbers: the owner of a launch keeps the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import device as Device

from ppstream_kernels.cuda_compile import RINGS, Plain, import_cuda
from ppstream_kernels.cuda_load import load_kernels
from ppstream_kernels.kernel_launch import THREADS, KernelLaunch, checked, index_of

TABLES: Final = 16  # kept: a window may stand between two of its reads while so many are written
RECORD_WORDS: Final = 2  # number of the window and of its table, before the table
NEVER_NS: Final = -(1 << 62)  # the end of a row that is absent

_SCATTER: Final = struct.Struct("=5Qq")
_BEGIN: Final = struct.Struct("=15Q5q4i")
_PREFIX: Final = struct.Struct("=6Q2q4i")
_FRAMES: Final = struct.Struct("=8Qq6f6i")
_LANE: Final = struct.Struct("=2Q2q")

_NAMES: Final = ("scatter", "begin", "prefix", "frames")
_SCATTER_BLOCKS: Final = 64
_MOST_THREADS: Final = 1024  # of the one block that begins a window of many targets
_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods
_THREAD_LOCAL_CAPTURE: Final = "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"


class Lane(NamedTuple):
    """The rings of one stream; ``words`` of 4 bytes a sample, 0 if it is copied otherwise."""

    values: int
    stamps_ns: int
    slots: int
    words: int


class ScatterCall(NamedTuple):
    """Addresses of ``scatter``: see ``rings.cu``."""

    block: int
    lanes: int
    tables: int
    current: int
    arrived: int
    table_words: int


class BeginCall(NamedTuple):
    """Addresses and numbers of ``begin``: see ``rings.cu``."""

    tables: int
    current: int
    slots: int
    targets_ns: int
    counts: int
    heads: int
    ends_ns: int
    present: int
    rows: int
    instructions: int  # 0: none
    conditionings: int  # 0: none
    records: int
    begun: int
    chosen: int
    limits: int  # 0: none
    table_words: int
    told_words: int
    depth: int
    dt_ns: int
    lease_ns: int
    batch: int
    streams: int
    steps: int
    reference: int


class PrefixCall(NamedTuple):
    """Addresses and numbers of ``prefix``: see ``rings.cu``."""

    tables: int
    chosen: int
    ends_ns: int
    discrete: int
    out: int
    delay_steps: int
    table_words: int
    dt_ns: int
    at: int
    words: int
    steps: int
    dim: int


class FramesCall(NamedTuple):
    """Addresses and numbers of ``frames``: see ``rings.cu``."""

    frames: int
    stamps_ns: int
    counts: int
    heads: int
    ends_ns: int
    out: int
    valid: int
    age_s: int
    max_age_ns: int
    scale: tuple[float, ...]  # by channel
    shift: tuple[float, ...]
    slots: int
    from_height: int
    from_width: int
    height: int
    width: int
    is_half: bool


def scatter(device: Device, call: ScatterCall) -> KernelLaunch:
    """Takes over the block at ``call.block``, and then its table."""
    return KernelLaunch(_kernel("scatter", device), (_SCATTER_BLOCKS, 1, 1), _SCATTER.pack(*call))


def begin(device: Device, call: BeginCall) -> KernelLaunch:
    """Fixes what the next window uses, as the rings are when it runs."""
    threads = THREADS if call.batch * call.steps <= THREADS else _MOST_THREADS
    return KernelLaunch(_kernel("begin", device), (1, 1, 1), _BEGIN.pack(*call), threads)


def prefix(device: Device, call: PrefixCall, *, batch: int) -> KernelLaunch:
    """Actions that each robot of the batch executes while its next chunk is made."""
    return KernelLaunch(_kernel("prefix", device), (batch, 1, 1), _PREFIX.pack(*call))


def frames(device: Device, call: FramesCall, *, batch: int, newest: int) -> KernelLaunch:
    """The ``newest`` frames of every row of the batch, oldest first."""
    *addresses, scale, shift, slots, from_height, from_width, height, width, is_half = call
    sizes = (slots, from_height, from_width, height, width, int(is_half))
    blocks = -(-height * width // THREADS)
    packed = _FRAMES.pack(*addresses, *scale, *shift, *sizes)
    return KernelLaunch(_kernel("frames", device), (blocks, newest, batch), packed)


def pack_lanes(lanes: list[Lane]) -> bytes:
    """As ``scatter`` reads them."""
    return b"".join(_LANE.pack(*lane) for lane in lanes)


def copy_to_device(to: int, source: int, size_bytes: int, stream: int) -> None:
    """Queues a copy from pinned memory."""
    checked(_driver().cuMemcpyHtoDAsync(to, source, size_bytes, stream))


class Recorded:
    """Queued work as one graph: what ``queue`` puts on the stream it is given, once and for all.

    Whatever it launches was launched before: nothing may be loaded while it is recorded.

    Attributes:
        graph: the driver's, as it was captured.
        nodes: kernels, copies and memsets of one ``queue``.
    """

    def __init__(self, queue: Callable[[int], None], device: Device) -> None:
        driver = _driver()
        stream = _cuda.Stream(device)
        mode = getattr(driver.CUstreamCaptureMode, _THREAD_LOCAL_CAPTURE)
        with torch.cuda.stream(stream):
            checked(driver.cuStreamBeginCapture(stream.cuda_stream, mode))
            try:
                queue(stream.cuda_stream)
            finally:
                (self.graph,) = checked(driver.cuStreamEndCapture(stream.cuda_stream))
        self.nodes: int = checked(driver.cuGraphGetNodes(self.graph, 0))[-1]
        (self._executable,) = checked(driver.cuGraphInstantiate(self.graph, 0))
        self._launch: Callable[..., Any] = driver.cuGraphLaunch

    def queue(self, stream: int) -> None:
        """Queues all of it on the driver's ``stream``."""
        checked(self._launch(self._executable, stream))


@cache
def _driver() -> Any:
    return import_cuda("cuda.bindings.driver")


def _kernel(name: str, device: Device) -> int:
    return _kernels(index_of(device))[name]


@cache
def _kernels(index: int) -> dict[str, int]:
    """The driver's handles of the kernels, by name."""
    return load_kernels(index, _NAMES, Plain(), RINGS)
