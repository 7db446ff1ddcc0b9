"""Launches ``resample.cu`` on torch's current stream: no synchronisation, no allocation on the GPU.

The first call of a form compiles or loads its kernel; that is for the warm-up, not for a capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from ppstream_kernels.cuda_call import (
    HEADER_ADDRESSES,
    STREAM_ADDRESSES,
    Form,
    Gpu,
    make_forms,
    stream_address_at,
)
from ppstream_kernels.cuda_compile import Variant, cached_cubin, import_cuda
from ppstream_kernels.source import Columns

_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has not used CUDA yet


class Launch:
    """A form with memory for its addresses: one thread at a time.

    The driver copies that memory while it queues, also into a graph that is being captured.
    """

    def __init__(self, form: Form, device_index: int) -> None:
        self._form, self._index = form, device_index
        self._kernel = _load(form.variant, device_index)
        self._memory = ctypes.create_string_buffer(form.parameters, len(form.parameters))
        self._argument = ctypes.c_void_p(ctypes.addressof(self._memory))
        self._argument_address = ctypes.addressof(self._argument)
        self._size = (*form.grid, form.threads, 1, 1, form.shared_bytes)
        self._launch_kernel = import_cuda("cuda.bindings.driver").cuLaunchKernel

    def read_from(self, columns: Columns) -> None:
        """Sets the addresses of this launch's streams."""
        for position, s in enumerate(self._form.streams):
            count, head = columns.counts[s], columns.heads[s]
            STREAM_ADDRESSES.pack_into(
                self._memory,
                stream_address_at(position),
                columns.values[s].data_ptr(),
                columns.stamps_ns[s].data_ptr(),
                0 if count is None else count.data_ptr(),
                0 if head is None else head.data_ptr(),
            )

    def queue(self, values: int, valid: int, age_s: int, tgt_ns: int) -> None:
        """Queues the kernel with these addresses of outputs and targets.

        Raises:
            RuntimeError: the driver refuses it.
        """
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self.queue(values, valid, age_s, tgt_ns)
        HEADER_ADDRESSES.pack_into(self._memory, 0, values, valid, age_s, tgt_ns)
        error = self._launch()
        if error == _INVALID_CONTEXT:
            torch.cuda.set_device(self._index)
            error = self._launch()
        if error != 0:
            raise RuntimeError(f"the driver refuses a launch of {self._size}: {error!r}")
        return None

    def _launch(self) -> Any:
        # torch.cuda.current_stream().cuda_stream says the same, 3 µs later.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        return self._launch_kernel(self._kernel, *self._size, stream, self._argument_address, 0)[0]


def make_launches(columns: Columns, tgt_ns: Tensor, values: Tensor) -> Sequence[Launch]:
    """What writes ``values`` from ``columns``; further calls may differ in addresses alone.

    Raises:
        RuntimeError: cuda-core is missing, or does not get on with this GPU or driver.
    """
    index = tgt_ns.device.index
    forms = make_forms(columns, tgt_ns, values, _gpu(index)) if tgt_ns.numel() else ()
    return [Launch(form, index) for form in forms]


@cache
def _gpu(index: int) -> Gpu:
    about = torch.cuda.get_device_properties(index)
    return Gpu(about.multi_processor_count, (about.major, about.minor))


_loaded: Final[list[Any]] = []  # what kernels belong to: they stay for the life of the process


@cache
def _load(variant: Variant, index: int) -> int:
    """The driver's handle of the kernel."""
    major, minor = _gpu(index).capability
    cubin = cached_cubin(variant, f"sm_{major}{minor}")
    with torch.cuda.device(index):
        torch.cuda.set_device(index)  # makes the context, if nothing has yet
        loaded = import_cuda("cuda.core").ObjectCode.from_cubin(cubin)
        kernel = loaded.get_kernel("resample")
    _loaded.append((loaded, kernel))
    return int(kernel.handle)
