"""What the loops on GPUs ask of the CUDA driver: streams, events, copies, counters in memory.

Thin and quick: every call here queues and returns; none waits for the device but ``Event.wait``.
Needs cuda-bindings, which CUDA builds of torch bring along, and the device's primary context,
which torch makes. What is queued where, and why, is ``link_peer.py``'s and the loops'.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

import torch

from ppstream.clock import NS_PER_MS
from ppstream.errors import ConfigError, ExitCode, PpstreamError

NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY: queued, not an error
GREATER_OR_EQUAL: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic, in 32 bits
NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: the legacy default stream does not order it
WRAP: Final = 1 << 32
IPC_LAZY: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
HOST_PORTABLE_MAPPED: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP


class DeviceError(PpstreamError):
    """The CUDA driver refused a call: what was asked, and its name for the reason."""

    exit_code = ExitCode.POISONED


class Event:
    """A point in a stream, with its time on the device; recorded again and again."""

    __slots__ = ("handle",)

    def __init__(self) -> None:
        (self.handle,) = checked(driver().cuEventCreate(0), "an event")

    def is_done(self) -> bool:
        """Whether what was queued before the newest ``record`` has finished."""
        error = driver().cuEventQuery(self.handle)[0]
        if error == 0:
            return True
        if error == NOT_READY:
            return False
        raise _refused(error, "work before an event")

    def wait(self) -> None:
        """Block this thread, without the interpreter's lock, until it is done."""
        checked(driver().cuEventSynchronize(self.handle), "waiting for an event")

    def ns_since(self, earlier: Event) -> int:
        """Device time between two events that are done; steps of 32 ns, float32 of ms.

        Exact to 0.1 µs when they are less than a second apart.
        """
        elapsed = driver().cuEventElapsedTime(earlier.handle, self.handle)
        (elapsed_ms,) = checked(elapsed, "the time between events")
        return round(float(elapsed_ms) * NS_PER_MS)


class CudaStream:
    """A queue of one device. ``cuda_streams.py`` says which there are, and who may wait on them.

    Args:
        handle: an existing stream; None creates one on the current device.
        urgent: at the highest priority.
    """

    __slots__ = ("handle",)

    def __init__(self, handle: int | None = None, *, urgent: bool = False) -> None:
        cuda = driver()
        if handle is not None:
            self.handle = cuda.CUstream(handle)
            return
        _, highest = checked(cuda.cuCtxGetStreamPriorityRange(), "stream priorities")
        created = cuda.cuStreamCreateWithPriority(NON_BLOCKING, highest if urgent else 0)
        (self.handle,) = checked(created, "a stream")

    def record(self, event: Event) -> None:
        """``event`` is done when all that was queued so far has finished."""
        if error := driver().cuEventRecord(event.handle, self.handle)[0]:
            raise _refused(error, "recording an event")

    def wait_for(self, event: Event) -> None:
        """What is queued from now on begins after the newest ``record`` of ``event``."""
        if error := driver().cuStreamWaitEvent(self.handle, event.handle, 0)[0]:
            raise _refused(error, "waiting for an event")

    def wait_value(self, address: int, value: int) -> None:
        """What is queued from now on begins when the 32 bits at ``address`` reach ``value``."""
        waiting = driver().cuStreamWaitValue32(self.handle, address, value % WRAP, GREATER_OR_EQUAL)
        if waiting[0]:
            raise _refused(waiting[0], "a wait for a counter")

    def write_value(self, address: int, value: int) -> None:
        """Set the 32 bits at ``address``, after all that was queued so far is visible there."""
        if error := driver().cuStreamWriteValue32(self.handle, address, value % WRAP, 0)[0]:
            raise _refused(error, "a write of a counter")

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between any two addresses that this device can reach; host ones pinned."""
        if error := driver().cuMemcpyAsync(target, source, size, self.handle)[0]:
            raise _refused(error, f"a copy of {size} bytes")

    def is_idle(self) -> bool:
        """Whether everything queued has finished."""
        error = driver().cuStreamQuery(self.handle)[0]
        if error == 0:
            return True
        if error == NOT_READY:
            return False
        raise _refused(error, "work in a stream")


class DeviceProbe:
    """For ``device_clock.DeviceClock``: events on a stream that is idle."""

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream

    def event(self) -> Event:
        return Event()

    def record(self, event: Event) -> None:
        self._stream.record(event)


class Memory:
    """Zeroed memory of the current device that another process may map; kept until it leaves."""

    def __init__(self, size: int) -> None:
        cuda = driver()
        self.size = size
        (address,) = checked(cuda.cuMemAlloc(size), f"{size} bytes on the device")
        self.address = int(address)
        checked(cuda.cuMemsetD8(address, 0, size), "zeroing memory")
        # a zero that lands after the peer's first write would lose it
        checked(cuda.cuCtxSynchronize(), "zeroing memory")

    def exported(self) -> str:
        """A name by which another process of this host can map it."""
        (handle,) = checked(driver().cuIpcGetMemHandle(self.address), "exporting memory")
        return bytes(handle.reserved).hex()

    def tensor(self, device: torch.device) -> torch.Tensor:
        """All of it, uint8; valid for the life of the process."""
        return torch.as_tensor(_Array(self.address, self.size), device=device)


class MappedMemory:
    """Another process's ``Memory``, as addresses that this device can write."""

    def __init__(self, exported: str) -> None:
        cuda = driver()
        handle = cuda.CUipcMemHandle()
        handle.reserved = bytes.fromhex(exported)
        (address,) = checked(cuda.cuIpcOpenMemHandle(handle, IPC_LAZY), "mapping the peer's memory")
        self.address = int(address)

    def close(self) -> None:
        """Unmap it; nothing queued may use it any more. Twice is fine."""
        if self.address:
            address, self.address = self.address, 0
            checked(driver().cuIpcCloseMemHandle(address), "unmapping the peer's memory")


def register_host(address: int, size: int) -> int:
    """Pin host memory that is mapped here already; returns its address for the device."""
    cuda = driver()
    checked(cuda.cuMemHostRegister(address, size, HOST_PORTABLE_MAPPED), "pinning shared memory")
    (pointer,) = checked(cuda.cuMemHostGetDevicePointer(address, 0), "pinned memory")
    return int(pointer)


@cache
def driver() -> Any:
    """The module cuda.bindings.driver.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            [f"placement: a GPU needs cuda-bindings ({error}); pip install 'ppstream[cuda]'"]
        ) from error


def checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """What a driver call returned behind its error code.

    Raises:
        DeviceError: the code says that it failed.
    """
    if result[0]:
        raise _refused(result[0], what)
    return result[1:]


class _Array:
    """Memory as torch takes it in without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _refused(error: Any, what: str) -> DeviceError:
    name = getattr(error, "name", str(error))
    return DeviceError(f"the CUDA driver refuses {what}: {name}")
