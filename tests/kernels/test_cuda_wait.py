from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppstream_kernels import cuda_wait
from ppstream_kernels.cuda_wait import Waits

DEVICE = torch.device("cuda", 99)  # no machine has it: a kernel loads once for a process
COUNTER = 0x7F00_1234_5678


class Launches:
    """A driver that reads the arguments as a launch does: when it is made."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, Any]] = []
        self.error = 0

    def CUfunction(self, handle: int) -> int:
        return handle

    def cuLaunchKernel(self, kernel: int, *rest: Any) -> tuple[int]:
        *shape, stream, arguments, _ = rest
        assert shape == [1, 1, 1, 32, 1, 1, 0]
        counter_at, value_at = (ctypes.c_void_p * 2).from_address(arguments)
        counter = ctypes.c_uint64.from_address(counter_at or 0).value
        value = ctypes.c_uint32.from_address(value_at or 0).value
        self.made.append((counter, value, stream))
        return (self.error,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(cuda_wait, "import_cuda", lambda name: launches)
    monkeypatch.setattr(cuda_wait, "load_kernels", lambda *_: {"wait_for_count": 5})
    current = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: SimpleNamespace(data_ptr=lambda: 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return launches


def test_a_launch_takes_the_counter_and_the_lower_half_of_the_count(driver: Launches) -> None:
    waits = Waits(DEVICE, COUNTER)
    assert driver.made == [(1, 0, 0)]  # it has run once, on memory of its own
    for count in (1, (1 << 32) - 1, 1 << 32, (1 << 33) + 7):
        waits.queue(count, "stream")
        assert driver.made[-1] == (COUNTER, count % (1 << 32), "stream")


def test_a_refusal_is_told(driver: Launches) -> None:
    waits = Waits(DEVICE, COUNTER)
    driver.error = 700
    with pytest.raises(RuntimeError, match="refuses to wait for a count: 700"):
        waits.queue(1, "stream")
