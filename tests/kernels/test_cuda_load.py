"""Kernels are loaded once for each device, and stay."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppstream_kernels import cuda_load
from ppstream_kernels.cuda_compile import RINGS, Plain


def test_every_kernel_of_a_source_is_found_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    handles = {"begin": 7, "scatter": 9}

    def compiled(variant: Any, arch: str, *, source: Path | None) -> bytes:
        asked.append((variant, arch, source))
        return b"cubin"

    made: list[weakref.ref[Code]] = []

    class Code:
        def get_kernel(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(handle=handles[name])

    def from_cubin(cubin: bytes) -> Code:
        asked.append(cubin)
        code = Code()
        made.append(weakref.ref(code))
        return code

    code = SimpleNamespace(from_cubin=from_cubin)
    about = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(cuda_load, "cached_cubin", compiled)
    monkeypatch.setattr(cuda_load, "import_cuda", lambda name: SimpleNamespace(ObjectCode=code))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    assert cuda_load.load_kernels(1, ("begin", "scatter"), Plain(), RINGS) == handles
    assert asked == [(Plain(), "sm_90", RINGS), 1, b"cubin"]
    gc.collect()
    assert made[0]() is not None  # else the driver would unload them
