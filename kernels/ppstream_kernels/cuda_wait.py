"""Launches ``wait.cu``: a stream stands until a counter in memory has reached a value.

Half the time of the driver's own wait, both when the count comes and when it is there already. It
holds one warp's place on a multiprocessor: a kernel beside it that fills the device takes up to a
quarter longer, so it belongs into the stream of a stage that has nothing to do meanwhile. It ends
when the counter moves, as the driver's wait does, and has no time-out: a robot may rest for a day.

``Waits`` takes the value with each launch. A launch of ``wait_stamped`` never changes: it reads the
value from host memory, and leaves there when it ended; ``cuda_stamped.py`` makes these.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import device as Device

from ppstream_kernels.cuda_compile import Plain, import_cuda
from ppstream_kernels.cuda_load import load_kernels
from ppstream_kernels.kernel_launch import DriverRefusedError

WAIT: Final = Path(__file__).with_name("wait.cu")
ARGUMENTS: Final = struct.Struct("=QI")  # counter, value

_STAMPED: Final = struct.Struct("=4Q")  # counter, other, now, ended
_VALUE_AT: Final = 8
_VALUE: Final = struct.Struct("=I")
_WRAP: Final = 1 << 32
_WARP: Final = 32
_ONE_WARP: Final = (1, 1, 1, _WARP, 1, 1, 0)  # blocks, threads, shared memory


class StampedWait(NamedTuple):
    """Arguments of ``wait_stamped``, all addresses.

    Attributes:
        counter: 32 bits that this device reaches.
        now: int64 words of the host's: the counter's value that is waited for, then the other's.
        ended: an int64 word of the host's: the device's time when it ended.
        other: a second counter, of this device's own; 0: none.
    """

    counter: int
    now: int
    ended: int
    other: int = 0

    def packed(self) -> bytes:
        """As ``wait.cu`` reads them."""
        return _STAMPED.pack(self.counter, self.other, self.now, self.ended)


class Waits:
    """Launches of waits for one counter: one thread at a time.

    The kernel is loaded and has run once when this returns.

    Args:
        device: whose streams will wait; current.
        counter: address of 32 bits that this device reaches.

    Raises:
        RuntimeError: cuda-core is missing, or the driver refuses the kernel.
    """

    def __init__(self, device: Device, counter: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        driver = import_cuda("cuda.bindings.driver")
        self._kernel: Any = driver.CUfunction(kernels(index)["wait_for_count"])
        self._launch: Any = driver.cuLaunchKernel
        self._memory = ctypes.create_string_buffer(ARGUMENTS.size)
        base = ctypes.addressof(self._memory)
        self._arguments = (ctypes.c_void_p * 2)(base, base + _VALUE_AT)
        self._first = ctypes.addressof(self._arguments)  # cuLaunchKernel reads addresses
        passed = torch.zeros(1, dtype=torch.int32, device=device)
        ARGUMENTS.pack_into(self._memory, 0, passed.data_ptr(), 0)
        self.queue(0, torch.cuda.current_stream(index).cuda_stream)
        torch.cuda.synchronize(device)
        ARGUMENTS.pack_into(self._memory, 0, counter, 0)

    def queue(self, count: int, stream: Any) -> None:
        """Hold the driver's ``stream`` until the counter is at ``count``: its lower 32 bits.

        Raises:
            DriverRefusedError: the driver refuses it.
        """
        _VALUE.pack_into(self._memory, _VALUE_AT, count % _WRAP)
        error = self._launch(self._kernel, *_ONE_WARP, stream, self._first, 0)[0]
        if error != 0:
            raise DriverRefusedError(f"the driver refuses to wait for a count: {error!r}")


@cache
def kernels(index: int) -> dict[str, int]:
    """The driver's handles of the kernels, by name."""
    return load_kernels(index, ("wait_for_count", "wait_stamped"), Plain(), WAIT)
