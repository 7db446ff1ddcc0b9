"""Times that kernels leave in pinned memory, and the probe that maps them to the host's clock.

A stamp is a word of the host's that is 0 until a kernel writes the device's time there: looking at
it is a load, not a call of the driver, and it costs the stream nothing, where a timing event takes
3 µs of it. It answers as ``driver.CudaEvent`` does, so who asks need not know which it has.
"""

from __future__ import annotations

import time
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from ppstream.core.clock import NS_PER_MS, now_ns

if TYPE_CHECKING:
    from ppstream.cuda.driver import CudaStream

WORD_BYTES: Final = 8
LATE_NS: Final = NS_PER_MS  # an answer takes some 3 µs: the device has no place for who gives it
POLL_S: Final = 0.00002
_PACKERS: Final = tuple(Struct(f"@{words}q").pack_into for words in range(17))


class DeviceStamp:
    """One word of ``words``, in ns of a device's own clock; cleared before it is used again."""

    __slots__ = ("_at", "_words")

    def __init__(self, words: memoryview, at: int) -> None:
        self._words, self._at = words, at

    @property
    def ns(self) -> int:
        """The device's time; 0: it was not written."""
        ns: int = self._words[self._at]
        return ns

    def ns_since(self, earlier: DeviceStamp) -> int | None:
        """Device time since a stamp that was written; None: this one was not."""
        ns: int = self._words[self._at]
        return ns - earlier._words[earlier._at] if ns else None

    def wait(self) -> bool:
        """Look until it was written; without a limit."""
        while not self._words[self._at]:
            time.sleep(POLL_S)
        return True


class SlotWords:
    """Pinned int64 words of each slot, zero at first; written by its kernels and by the host.

    Attributes:
        words: all of them, those of a slot side by side.
        width: of a slot.
    """

    def __init__(self, slots: int, width: int) -> None:
        self._memory = torch.zeros(
            slots * width, dtype=torch.int64, pin_memory=torch.cuda.is_available()
        )
        numbers: Any = self._memory.numpy()
        self.words: memoryview = numbers.data
        self.width = width
        self._base = self._memory.data_ptr()

    def write(self, slot: int, at: int, *numbers: int) -> None:
        """Set a slot's words from ``at`` on: sooner than one by one."""
        _PACKERS[len(numbers)](self.words, (slot * self.width + at) * WORD_BYTES, *numbers)

    def address(self, slot: int, at: int) -> int:
        """Returns the address of a word, for kernels."""
        return self._base + (slot * self.width + at) * WORD_BYTES

    def stamp(self, slot: int, at: int) -> DeviceStamp:
        return DeviceStamp(self.words, slot * self.width + at)


class DeviceTime(Protocol):
    """Tells the device's time, as ``cuda_clock.ClockAnswers``."""

    def ask(self, stream: Any) -> None: ...

    def answer(self, stream: Any) -> int | None: ...


class ClockStamp(DeviceStamp):
    """The answer to one question."""

    __slots__ = ("_probe",)

    def __init__(self, probe: StampProbe) -> None:
        super().__init__(memoryview(bytearray(WORD_BYTES)).cast("q"), 0)
        self._probe = probe

    def wait(self) -> bool:
        """Look until the device has answered; False: it has not within ``LATE_NS``."""
        answer = self._probe.answer
        ns = answer()
        if ns is None:
            until_ns = now_ns() + LATE_NS
            while (ns := answer()) is None:
                if now_ns() > until_ns:
                    return False
        self._words[0] = ns
        return True


class StampProbe:
    """For ``device_clock.DeviceClock``: questions to a kernel on a stream that is idle."""

    def __init__(self, answers: DeviceTime, stream: CudaStream) -> None:
        self._answers, self._stream = answers, stream

    def event(self) -> ClockStamp:
        return ClockStamp(self)

    def record(self, event: ClockStamp) -> None:
        self._answers.ask(self._stream.handle)

    def answer(self) -> int | None:
        return self._answers.answer(self._stream.handle)
