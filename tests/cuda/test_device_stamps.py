"""Words that kernels write are read as times; who answers too late is not waited for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ppstream.cuda import device_stamps
from ppstream.cuda.device_clock import DeviceClock
from ppstream.cuda.device_stamps import SlotWords, StampProbe
from ppstream.cuda.driver import CudaStream


def test_a_stamp_is_there_once_its_word_is_written() -> None:
    slots = SlotWords(3, 4)
    first, second = slots.stamp(1, 2), slots.stamp(2, 0)
    assert first.ns_since(second) is None
    slots.words[1 * 4 + 2], slots.words[2 * 4] = 1_500, 2_700
    assert second.ns_since(first) == 1_200
    assert first.ns_since(second) == -1_200
    assert slots.address(2, 0) - slots.address(1, 2) == 2 * 8


def test_who_waits_for_a_stamp_goes_on_when_it_is_written() -> None:
    slots = SlotWords(1, 1)
    stamp = slots.stamp(0, 0)
    waiting = threading.Thread(target=stamp.wait)
    waiting.start()
    slots.words[0] = 1
    waiting.join(60)
    assert not waiting.is_alive()


class Device:
    """Answers with a clock of its own, the ``silent`` first questions never."""

    def __init__(self, silent: int = 0) -> None:
        self.silent = silent
        self.questions = 0

    def ask(self, stream: Any) -> None:
        self.questions += 1

    def answer(self, stream: Any) -> int | None:
        return None if self.questions <= self.silent else device_stamps.now_ns() + 77_000_000_000


def probe(device: Device) -> StampProbe:
    stream: CudaStream = CudaStream.__new__(CudaStream)
    stream.handle = 0
    return StampProbe(device, stream)


def test_stamps_are_mapped_by_what_the_device_answered() -> None:
    slots = SlotWords(1, 1)
    clock = DeviceClock(probe(Device()))
    before_ns = device_stamps.now_ns()
    slots.words[0] = before_ns + 77_000_000_000
    found_ns = clock.host_ns(slots.stamp(0, 0))
    assert found_ns is not None
    assert abs(found_ns - before_ns) <= clock.state.bracket_ns


def test_a_question_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_stamps, "LATE_NS", 1000)
    device = Device(silent=3)
    asked = probe(device)
    event = asked.event()
    asked.record(event)
    assert event.wait() is False
    clock: DeviceClock[Any] = DeviceClock(asked)  # asks until it is answered
    assert device.questions > device.silent
    assert clock.state.bracket_ns >= 0
