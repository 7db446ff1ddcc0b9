"""Calls of the driver: what it refuses is said, and nothing is queued behind it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from fake_cuda import FakeDriver, queue_call

from ppstream.cuda import driver as memops
from ppstream.cuda.driver import CudaEvent, CudaStream, DeviceError, DriverCall, LaunchSequence


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver()
    monkeypatch.setattr(memops, "driver", lambda: driver)
    yield driver
    driver.close()


def _wait(gate: threading.Event) -> None:
    assert gate.wait(60)


def test_a_routine_queues_its_calls_in_order_each_time(driver: FakeDriver) -> None:
    first, second = CudaStream(), CudaStream()
    begun, copied = CudaEvent(), CudaEvent()
    source, target = (ctypes.c_int64 * 1)(5), (ctypes.c_int64 * 1)()
    routine = LaunchSequence(
        second.to_wait_for(begun),
        second.to_copy(ctypes.addressof(target), ctypes.addressof(source), 8),
        second.to_record(copied),
    )
    for value in (5, 6):
        source[0] = value
        gate = threading.Event()
        queue_call(first, partial(_wait, gate))
        first.record(begun)
        routine()
        assert copied.ns_since(begun) is None
        assert target[0] != value
        gate.set()
        copied.wait()
        assert target[0] == value
        assert (copied.ns_since(begun) or 0) > 0


def test_a_refused_call_ends_the_routine_and_says_what_it_was(driver: FakeDriver) -> None:
    made: list[int] = []

    def last() -> tuple[int]:
        made.append(1)
        return (0,)

    routine = LaunchSequence(
        DriverCall(lambda: (0,), "the first"),
        DriverCall(lambda: (700,), "a copy of 8 bytes"),
        DriverCall(last, "the last"),
    )
    with pytest.raises(DeviceError, match="refuses a copy of 8 bytes: 700"):
        routine()
    assert not made
