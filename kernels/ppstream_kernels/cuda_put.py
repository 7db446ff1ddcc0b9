"""Launches ``put.cu``: a message into another device's memory, and its count, in one kernel.

``Puts`` takes count and header with each launch. A launch of ``put_stamped`` never changes: it
reads them from host memory, and leaves there when it began, when all was counted, and words of what
the host wants to know; ``cuda_stamped.py`` makes these.

No synchronisation and no allocation once made. Addresses are plain numbers: the maker of the
launches keeps the memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import device as Device

from ppstream_kernels.cuda_compile import Plain, import_cuda
from ppstream_kernels.cuda_load import load_kernels
from ppstream_kernels.kernel_launch import DriverRefusedError

PUT: Final = Path(__file__).with_name("put.cu")
HEADER_WORDS: Final = 16  # most

_FIXED: Final = struct.Struct("=4Qq")  # from, to, counter, arrived, bytes
_COUNTED: Final = struct.Struct("=q")  # value
_STAMPED: Final = struct.Struct("=5Qq")  # now, began, ended, named, names, name_words
_MESSAGE: Final = _FIXED.size + _COUNTED.size + (1 + HEADER_WORDS) * 8
_BLOCK_BYTES: Final = 1 << 15  # of a message that one block takes
_MOST_BLOCKS: Final = 32
_VECTOR_BYTES: Final = 16
_WARP: Final = 32
_MOST_THREADS: Final = 1024
_FLAG: Final = 4  # bytes of a count of blocks


class Route(NamedTuple):
    """Source and destination of a message."""

    source: int  # an address of this device
    target: int  # one that this device can write
    size: int  # in bytes


class Stamps(NamedTuple):
    """Host memory of one message that ``put_stamped`` sends: addresses of int64 words.

    Attributes:
        now: the count, then the header; read by each launch.
        began: the device's time when it began; written first.
        ended: the device's time when all was counted; written last. 0: nobody asks.
        names: where words of device memory are copied to.
        named: these words.
        name_words: how many.
    """

    now: int
    began: int
    ended: int = 0
    names: int = 0
    named: int = 0
    name_words: int = 0


class Puts:
    """Launches of messages on fixed routes: one thread at a time.

    The kernel is loaded and has run once when this returns: nothing is loaded later, beside
    something that waits.

    Args:
        device: of the sources; current.
        routes: of messages, which are named by their position here.
        counter: address of the receiver's, 32 bits.

    Raises:
        RuntimeError: cuda-core is missing, or the driver refuses the kernel.
    """

    def __init__(self, device: Device, routes: Sequence[Route], counter: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        driver = import_cuda("cuda.bindings.driver")
        kernel = driver.CUfunction(
            kernels(index)["put"]
        )  # once: the driver's call takes it as it is
        self._launch: Any = driver.cuLaunchKernel
        self._arrived = torch.zeros(len(routes) + 1, dtype=torch.int32, device=device)
        arrived = self._arrived.data_ptr()
        messages = [(route, counter) for route in routes]
        messages.append((Route(0, 0, 0), arrived + len(routes) * _FLAG))  # counted on this end
        self._memory = ctypes.create_string_buffer(len(messages) * _MESSAGE)
        base = ctypes.addressof(self._memory)
        at = range(base, base + len(messages) * _MESSAGE, _MESSAGE)
        self._arguments = (ctypes.c_void_p * len(messages))(*at)  # cuLaunchKernel reads addresses
        first, size = ctypes.addressof(self._arguments), ctypes.sizeof(ctypes.c_void_p)
        self._launches: list[tuple[tuple[Any, ...], int]] = []
        for number, (route, counted) in enumerate(messages):
            blocks, threads = grid(route.size)
            pack_route(self._memory, number, route, counted, arrived + number * _FLAG)
            shape = (kernel, blocks, 1, 1, threads, 1, 1, 0)
            self._launches.append((shape, first + number * size))
        self.queue(len(routes), 1, torch.cuda.current_stream(index).cuda_stream)
        torch.cuda.synchronize(device)

    def write_header(self, message: int, numbers: Sequence[int]) -> None:
        """Writes the header of ``message``, in int64 words, until written again."""
        pack_header(self._memory, message, numbers)

    def queue(self, message: int, count: int, stream: Any) -> None:
        """Send ``message`` and count it, on the driver's ``stream``.

        Raises:
            DriverRefusedError: the driver refuses it.
        """
        pack_count(self._memory, message, count)
        shape, arguments = self._launches[message]
        error = self._launch(*shape, stream, arguments, 0)[0]
        if error != 0:
            raise DriverRefusedError(f"the driver refuses to send a message: {error!r}")


def grid(size: int) -> tuple[int, int]:
    """Blocks, and threads of each, for a message of ``size`` bytes."""
    blocks = min(_MOST_BLOCKS, max(1, -(-size // _BLOCK_BYTES)))
    warps = -(-size // (blocks * _VECTOR_BYTES * _WARP))
    return blocks, min(_MOST_THREADS, max(1, warps) * _WARP)


def pack_stamped(
    route: Route, counter: int, arrived: int, stamps: Stamps, header_words: int
) -> bytes:
    """Packs the arguments of ``put_stamped``.

    Raises:
        ValueError: the header is too long.
    """
    memory = bytearray(_MESSAGE)
    pack_route(memory, 0, route, counter, arrived)
    pack_header(memory, 0, [0] * header_words)
    now, began, ended, names, named, name_words = stamps
    return bytes(memory) + _STAMPED.pack(now, began, ended, named, names, name_words)


def pack_route(memory: Any, message: int, route: Route, counter: int, arrived: int) -> None:
    """Packs what stays the same from one sending of ``message`` to the next."""
    source, target, size = route
    _FIXED.pack_into(memory, message * _MESSAGE, source, target, counter, arrived, size)


def pack_count(memory: Any, message: int, count: int) -> None:
    """Packs the value that the counter is set to; its lower 32 bits."""
    _COUNTED.pack_into(memory, message * _MESSAGE + _FIXED.size, count)


def pack_header(memory: Any, message: int, numbers: Sequence[int]) -> None:
    """Packs the header of ``message``.

    Raises:
        ValueError: it is too long.
    """
    at = message * _MESSAGE + _FIXED.size + _COUNTED.size
    _headers(len(numbers)).pack_into(memory, at, len(numbers), *numbers)


@cache
def _headers(words: int) -> struct.Struct:
    if words > HEADER_WORDS:
        raise ValueError(f"a header of {words} words, at most {HEADER_WORDS} fit")
    return struct.Struct(f"={1 + words}q")


@cache
def kernels(index: int) -> dict[str, int]:
    """The driver's handles of the kernels, by name."""
    return load_kernels(index, ("put", "put_stamped"), Plain(), PUT)
