"""Calls of the CUDA driver for the loops on GPUs: streams, events, copies, counters in memory.

Thin and quick: every call here queues and returns; only ``CudaEvent.wait`` waits for the device.
Functions of the driver are bound once to what calls them.
Needs cuda-bindings, which CUDA builds of torch bring along, and the device's primary context,
which torch makes. What is queued where, and why, is ``links/peer_memory.py``'s and the loops'.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch

from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import ConfigError, ExitCode, PpstreamError

NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY: queued, not an error
GREATER_OR_EQUAL: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic, in 32 bits
NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: the legacy default stream does not order it
WRAP: Final = 1 << 32
IPC_LAZY: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
HOST_PORTABLE_MAPPED: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP


class DeviceError(PpstreamError):
    """The CUDA driver refused a call: what was asked, and its name for the reason."""

    exit_code = ExitCode.POISONED


class CudaEvent:
    """A point in a stream, with its time on the device; recorded again and again."""

    __slots__ = ("_elapsed", "_query", "handle")
    _elapsed: Callable[[Any, Any], tuple[int, float]]

    def __init__(self) -> None:
        cuda = driver()
        (self.handle,) = checked(cuda.cuEventCreate(0), "an event")
        self._query, self._elapsed = cuda.cuEventQuery, cuda.cuEventElapsedTime

    def is_done(self) -> bool:
        """True when what was queued before the newest ``record`` has finished.

        The driver takes ten times as long for it as for ``ns_since``, which says it, too.
        """
        error = self._query(self.handle)[0]
        if error == 0:
            return True
        if error == NOT_READY:
            return False
        raise _refused(error, "work before an event")

    def wait(self) -> bool:
        """Block this thread, without the interpreter's lock, until it is done; True."""
        checked(driver().cuEventSynchronize(self.handle), "waiting for an event")
        return True

    def ns_since(self, earlier: CudaEvent) -> int | None:
        """Device time since an event that is done; None: this one is not.

        In steps of 32 ns, float32 of ms: exact to 0.1 µs when they are less than a second apart.
        """
        error, elapsed_ms = self._elapsed(earlier.handle, self.handle)
        if error == 0:
            return round(elapsed_ms * NS_PER_MS)
        if error == NOT_READY:
            return None
        raise _refused(error, "the time between events")


class CudaStream:
    """A queue of one device. ``streams.py`` says which there are, and who may wait on them.

    Args:
        handle: an existing stream; None creates one on the current device.
        urgent: at the highest priority.
    """

    __slots__ = ("_copy", "_record", "_wait_event", "_wait_value", "_write_value", "handle")

    def __init__(self, handle: int | None = None, *, urgent: bool = False) -> None:
        cuda = driver()
        self._record, self._wait_event = cuda.cuEventRecord, cuda.cuStreamWaitEvent
        self._wait_value, self._write_value = cuda.cuStreamWaitValue32, cuda.cuStreamWriteValue32
        self._copy = cuda.cuMemcpyAsync
        if handle is not None:
            self.handle = cuda.CUstream(handle)
            return
        _, highest = checked(cuda.cuCtxGetStreamPriorityRange(), "stream priorities")
        created = cuda.cuStreamCreateWithPriority(NON_BLOCKING, highest if urgent else 0)
        (self.handle,) = checked(created, "a stream")

    def to_record(self, event: CudaEvent) -> DriverCall:
        """Returns ``record`` as part of a ``LaunchSequence``."""
        return DriverCall(partial(self._record, event.handle, self.handle), "recording an event")

    def to_wait_for(self, event: CudaEvent) -> DriverCall:
        """Returns ``wait_for`` as part of a ``LaunchSequence``."""
        return DriverCall(
            partial(self._wait_event, self.handle, event.handle, 0), "waiting for an event"
        )

    def to_copy(self, target: int, source: int, size: int) -> DriverCall:
        """Returns ``copy`` as part of a ``LaunchSequence``."""
        return DriverCall(
            partial(self._copy, target, source, size, self.handle), f"a copy of {size} bytes"
        )

    def to_launch(self, graph: int) -> DriverCall:
        """The start of an executable graph, by its handle, as part of a ``LaunchSequence``."""
        return DriverCall(
            partial(driver().cuGraphLaunch, graph, self.handle), "the start of a graph"
        )

    def record(self, event: CudaEvent) -> None:
        """``event`` is done when all that was queued so far has finished."""
        if error := self._record(event.handle, self.handle)[0]:
            raise _refused(error, "recording an event")

    def wait_for(self, event: CudaEvent) -> None:
        """Makes what is queued from now on begin after the newest ``record`` of ``event``."""
        if error := self._wait_event(self.handle, event.handle, 0)[0]:
            raise _refused(error, "waiting for an event")

    def wait_value(self, address: int, value: int) -> None:
        """Holds what is queued from now on until the 32 bits at ``address`` reach ``value``."""
        if error := self._wait_value(self.handle, address, value % WRAP, GREATER_OR_EQUAL)[0]:
            raise _refused(error, "a wait for a counter")

    def write_value(self, address: int, value: int) -> None:
        """Set the 32 bits at ``address``, after all that was queued so far is visible there."""
        if error := self._write_value(self.handle, address, value % WRAP, 0)[0]:
            raise _refused(error, "a write of a counter")

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between any two addresses that this device can reach; host ones pinned."""
        if error := self._copy(target, source, size, self.handle)[0]:
            raise _refused(error, f"a copy of {size} bytes")

    def is_idle(self) -> bool:
        """True when everything queued has finished."""
        error = driver().cuStreamQuery(self.handle)[0]
        if error == 0:
            return True
        if error == NOT_READY:
            return False
        raise _refused(error, "work in a stream")


class DriverCall(NamedTuple):
    """A call of the driver with all its arguments."""

    make: Callable[[], tuple[Any, ...]]
    what: str


class LaunchSequence:
    """Calls that are made again and again, in order and always the same: queues all of them.

    A third of what the same calls cost through the methods of streams.
    """

    __slots__ = ("_calls",)

    def __init__(self, *calls: DriverCall) -> None:
        self._calls = calls

    def then(self, *calls: DriverCall) -> LaunchSequence:
        """Returns these calls, and ``calls`` behind them."""
        return LaunchSequence(*self._calls, *calls)

    def __call__(self) -> None:
        for make, what in self._calls:
            if error := make()[0]:
                raise _refused(error, what)


class DeviceProbe:
    """For ``device_clock.DeviceClock``: events on a stream that is idle."""

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream

    def event(self) -> CudaEvent:
        return CudaEvent()

    def record(self, event: CudaEvent) -> None:
        self._stream.record(event)


class DeviceMemory:
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
    """Another process's ``DeviceMemory``, as addresses that this device can write."""

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


def unregister_host(address: int) -> None:
    """Unpin what ``register_host`` pinned; nothing queued may use it any more."""
    checked(driver().cuMemHostUnregister(address), "unpinning shared memory")


def graph_nodes(graph: int) -> int:
    """Returns the number of kernels, copies and memsets of a captured graph, by its handle."""
    cuda = driver()
    count: int = checked(cuda.cuGraphGetNodes(cuda.CUgraph(graph), 0), "the nodes of a graph")[-1]
    return count


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
    """Returns what a driver call gave behind its error code.

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
