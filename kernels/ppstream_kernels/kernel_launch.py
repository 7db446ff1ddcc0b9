"""KernelLaunch: a kernel with all its arguments, made once and queued as often as wanted.

Also into a graph: the arguments never change. Addresses in them are plain numbers: the owner of a
launch keeps the memory, or hands it to the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import device as Device

from ppstream_kernels.cuda_compile import import_cuda

THREADS: Final = 256


class DriverRefusedError(RuntimeError):
    """The CUDA driver refused a call; behind an error of a kernel it refuses all further ones."""


class KernelLaunch:
    """One kernel whose only parameter is a struct.

    Args:
        kernel: the driver's handle.
        grid: blocks.
        arguments: the struct.
        threads: of a block.
        memory: lives as long as the launch.
    """

    def __init__(
        self,
        kernel: int,
        grid: tuple[int, int, int],
        arguments: bytes,
        threads: int = THREADS,
        memory: object = None,
    ) -> None:
        driver = import_cuda("cuda.bindings.driver")
        self._kernel = driver.CUfunction(kernel)  # once: the driver's call takes it as it is
        self._memory = ctypes.create_string_buffer(arguments, len(arguments))
        self._argument = ctypes.c_void_p(ctypes.addressof(self._memory))
        self._size = (*grid, threads, 1, 1, 0)
        self._address = ctypes.addressof(self._argument)
        self._launch: Callable[..., Any] = driver.cuLaunchKernel
        self._driver, self._handle, self._kept = driver, kernel, memory

    def queue(self, stream: Any) -> None:
        """Queues the kernel on the driver's ``stream``.

        Raises:
            DriverRefusedError: the driver refuses it.
        """
        answer = self._launch(self._kernel, *self._size, stream, self._address, 0)
        if answer[0]:
            checked(answer)

    def add_to(self, graph: Any, after: list[Any]) -> Any:
        """Adds the kernel to the driver's ``graph``, behind the nodes ``after``; returns its node.

        Raises:
            DriverRefusedError: the driver refuses it.
        """
        node = self._driver.CUDA_KERNEL_NODE_PARAMS()
        # a node wants the function of the current context; a launch takes the kernel's handle, too
        kernel = self._driver.CUkernel(self._handle)
        node.func = checked(self._driver.cuKernelGetFunction(kernel))[0]
        node.gridDimX, node.gridDimY, node.gridDimZ = self._size[:3]
        node.blockDimX, node.blockDimY, node.blockDimZ, node.sharedMemBytes = self._size[3:]
        node.kernelParams, node.extra = self._address, 0
        return checked(self._driver.cuGraphAddKernelNode(graph, after, len(after), node))[0]


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what a call of the driver gave.

    Raises:
        DriverRefusedError: it gave an error.
    """
    if answer[0] != 0:
        raise DriverRefusedError(f"the CUDA driver refuses: {answer[0]!r}")
    return answer[1:]


def index_of(device: Device) -> int:
    """Returns the index of ``device``; of one without, that of the current device."""
    return torch.cuda.current_device() if device.index is None else device.index
