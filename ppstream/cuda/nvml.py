"""Memory of a GPU that other programs hold, by NVML, a part of the driver.

NVML lists processes by the numbers of the host. In a container those are not this process's own
numbers, or the list is empty: then it is known only what was in use before this process began.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from ppstream.control.peer_process import descendants
from ppstream.core.errors import ConfigError
from ppstream.cuda.driver import driver

LIBRARY: Final = "libnvidia-ml.so.1"
LISTS: Final = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
)
PROCESSES_MAX: Final = 256
NOT_KNOWN: Final = 2**64 - 1  # a process's memory that the driver does not tell
#: Equal in all ranks of a run on one host, and in what they start.
SAME: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


class _Memory(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),  # by the driver for itself
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class GpuWatch:
    """One GPU; to be made before this process holds anything on it.

    Attributes:
        found_bytes: in use when it was made, by any program; None: NVML does not tell.
    """

    def __init__(self, uuid: str) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(LIBRARY)
            name = ctypes.c_char_p(uuid.encode())
            handle = ctypes.byref(self._handle)
            if not library.nvmlInit_v2() and not library.nvmlDeviceGetHandleByUUID(name, handle):
                self._library = library
        self.found_bytes = self._used()
        self._names_others = os.getpid() not in self._processes()  # else numbers of another host

    def others_bytes(self) -> int | None:
        """Memory that processes hold which are not of this run; None: it cannot be told."""
        held, run = self._processes(), _run_of("self")
        if not (run and self._names_others and os.getpid() in held):
            return None
        others = [used for pid, used in held.items() if not _is_ours(pid, run)]
        return None if NOT_KNOWN in others else sum(others)

    def _used(self) -> int | None:
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        with suppress(AttributeError):  # there is no library, or it is an old one
            if not self._library.nvmlDeviceGetMemoryInfo_v2(self._handle, ctypes.byref(memory)):
                return int(memory.used)
        return None

    def _processes(self) -> dict[int, int]:
        """Bytes by process; NOT_KNOWN where the driver does not tell them."""
        found: dict[int, int] = {}
        for name in LISTS:
            listed, count = (_Process * PROCESSES_MAX)(), ctypes.c_uint(PROCESSES_MAX)
            with suppress(AttributeError):
                if getattr(self._library, name)(self._handle, ctypes.byref(count), listed):
                    continue
                for one in listed[: count.value]:
                    found[one.pid] = max(found.get(one.pid, 0), one.used)
        return found


def watch(index: int) -> GpuWatch | None:
    """The CUDA device of this number, without a context on it; None: CUDA does not name it."""
    with suppress(ConfigError, RuntimeError, AttributeError):  # bindings or driver are not there
        cuda = driver()
        cuda.cuInit(0)
        error, device = cuda.cuDeviceGet(index)
        if not error:
            error, uuid = cuda.cuDeviceGetUuid(device)
            return None if error else GpuWatch(f"GPU-{UUID(bytes=bytes(uuid.bytes))}")
    return None


def _is_ours(pid: int, run: Mapping[str, str]) -> bool:
    """A rank of this run on this host, or what this one has started."""
    return _run_of(str(pid)) == run or pid in (os.getpid(), *descendants(os.getpid()))


def _run_of(pid: str) -> Mapping[str, str]:
    """Returns what names the run in a process's environment; {}: nothing, or it is not ours."""
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return {k: v for k, _, v in (pair.partition("=") for pair in pairs) if k in SAME}
    return {}
