"""Launches ``resample.cu`` on torch's current stream: no synchronisation, no allocation on the GPU.

The first call of a form compiles or loads its kernel; that is for the warm-up, not for a capture.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, TypeAlias

import torch

from ppstream_kernels.cuda_call import (
    HEADER_ADDRESSES,
    STREAM_ADDRESSES,
    Gpu,
    LaunchForm,
    stream_address_at,
)
from ppstream_kernels.cuda_compile import Variant, import_cuda
from ppstream_kernels.cuda_load import load_kernels
from ppstream_kernels.kernel_launch import DriverRefusedError

Addresses: TypeAlias = tuple[int, ...]

_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has not used CUDA yet

# A launch is one piece of memory: the driver's CUlaunchConfig, a pointer to the call, the call.
_CONFIG: Final = struct.Struct("=7I4x2QI4x")  # grid, block, shared bytes; stream; attributes
_STREAM_AT: Final = 32  # in a CUlaunchConfig
_POINTER: Final = struct.Struct("=Q")
_CALL_AT: Final = _CONFIG.size + _POINTER.size

# The one attribute, a CUlaunchAttribute: the launch may begin while the one before it ends. The
# kernel itself waits for that one's results; half a microsecond of launching passes meanwhile.
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_OVERLAPPING: Final = ctypes.create_string_buffer(
    struct.pack("=i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
)
_OVERLAPPING_CAPABILITY: Final = (9, 0)
_OVERLAPPING_DRIVER: Final = 12030  # the first that captures it into graphs


class Prepared:
    """A form on its device, its kernel loaded: everything but addresses.

    Args:
        form: the launch.
        index: of the device.

    Raises:
        RuntimeError: cuda-core is missing, or does not get on with this GPU or driver.
    """

    def __init__(self, form: LaunchForm, index: int) -> None:
        self.form, self.index = form, index
        self.size = (*form.grid, form.threads, 1, 1, form.shared_bytes)
        self.kernel = _load(form.variant, index)
        attributes = (ctypes.addressof(_OVERLAPPING), 1) if _may_overlap(index) else (0, 0)
        config = _CONFIG.pack(*self.size, 0, *attributes)
        self.memory = config + bytes(_POINTER.size) + form.parameters
        self.launch_kernel = launch_function()
        self.current_device, self.current_stream = torch_calls()


def make_queue(
    prepared: Prepared, header: Addresses, streams: Sequence[Addresses]
) -> Callable[[], None]:
    """Returns a call that queues a launch with all its addresses; one thread at a time.

    Addresses are plain numbers: the caller of a launch keeps the memory. The driver copies the
    arguments while it queues, also into a graph that is being captured.

    Args:
        prepared: what is launched.
        header: addresses of values, valid, age_s, tgt_ns and scale, 0 where absent.
        streams: addresses of values, stamps_ns, counts and heads of every stream of the call,
            served by this launch or not; 0 where absent.

    Returns:
        The call; it raises DriverRefusedError where the driver refuses the launch.
    """
    memory = _memory(prepared, header, streams)
    # Variables of a closure: attributes would cost a call a tenth of a microsecond.
    at = ctypes.addressof(memory)
    index, kernel, arguments_at = prepared.index, prepared.kernel, at + _CONFIG.size
    current_device, current_stream = prepared.current_device, prepared.current_stream
    launch_kernel = prepared.launch_kernel
    written_stream = 0

    def queue() -> None:
        nonlocal written_stream
        if current_device() != index:
            with torch.cuda.device(index):
                return queue()
        stream = current_stream(index)
        if stream != written_stream:
            _POINTER.pack_into(memory, _STREAM_AT, stream)
            written_stream = stream
        error = launch_kernel(at, kernel, arguments_at, None)
        if error == _INVALID_CONTEXT:
            torch.cuda.set_device(index)
            error = launch_kernel(at, kernel, arguments_at, None)
        if error != 0:
            name = import_cuda("cuda.bindings.driver").CUresult(error)
            raise DriverRefusedError(f"the driver refuses a launch of {prepared.size}: {name!r}")
        return None

    return queue


def _memory(
    prepared: Prepared, header: Addresses, streams: Sequence[Addresses]
) -> ctypes.Array[ctypes.c_char]:
    memory = ctypes.create_string_buffer(prepared.memory, len(prepared.memory))
    _POINTER.pack_into(memory, _CONFIG.size, ctypes.addressof(memory) + _CALL_AT)
    HEADER_ADDRESSES.pack_into(memory, _CALL_AT, *header)
    for position, s in enumerate(prepared.form.streams):
        STREAM_ADDRESSES.pack_into(memory, _CALL_AT + stream_address_at(position), *streams[s])
    return memory


def torch_calls() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Torch's index of the current device, and the driver's stream that is current on a device.

    ``torch.cuda.current_stream().cuda_stream`` says the same, 3 µs later.
    """
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream


@cache
def launch_function() -> Callable[..., int]:
    """The driver's own function: its Python binding takes twice as long to get there."""
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    call.argtypes = [ctypes.c_void_p] * 4
    return call


def _may_overlap(index: int) -> bool:
    is_able = gpu(index).capability >= _OVERLAPPING_CAPABILITY
    return is_able and driver_version() >= _OVERLAPPING_DRIVER


@cache
def driver_version() -> int:
    """The newest CUDA that the driver knows, as 12030 for 12.3; 0 where it does not answer."""
    error, version = import_cuda("cuda.bindings.driver").cuDriverGetVersion()
    return int(version) if error == 0 else 0


@cache
def gpu(index: int) -> Gpu:
    """Returns what a tiling depends on, of the device with this index."""
    about = torch.cuda.get_device_properties(index)
    return Gpu(about.multi_processor_count, (about.major, about.minor))


@cache
def _load(variant: Variant, index: int) -> int:
    """The driver's handle of the kernel."""
    return load_kernels(index, ("resample",), variant)["resample"]
