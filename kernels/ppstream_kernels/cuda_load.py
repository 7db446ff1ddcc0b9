"""Loads kernels of a ``.cu`` file onto a device, for the life of the process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ppstream_kernels.cuda_compile import Plain, Variant, cached_cubin, import_cuda

_loaded: Final[list[Any]] = []  # what kernels belong to


def load_kernels(
    index: int, names: Sequence[str], variant: Variant | Plain, source: Path | None = None
) -> dict[str, int]:
    """The driver's handles of the kernels ``names`` on the device ``index``.

    Args:
        index: of the device, which becomes the calling thread's for as long as this takes.
        names: of kernels in the source.
        variant: what the source is specialised for.
        source: default ``resample.cu``.

    Raises:
        RuntimeError: cuda-core is missing, or does not get on with this GPU or driver.
    """
    about = torch.cuda.get_device_properties(index)
    cubin = cached_cubin(variant, f"sm_{about.major}{about.minor}", source=source)
    with torch.cuda.device(index):
        torch.cuda.set_device(index)  # makes the context, if nothing has yet
        loaded = import_cuda("cuda.core").ObjectCode.from_cubin(cubin)
        kernels = {name: loaded.get_kernel(name) for name in names}
    _loaded.append((loaded, kernels))
    return {name: int(kernel.handle) for name, kernel in kernels.items()}
