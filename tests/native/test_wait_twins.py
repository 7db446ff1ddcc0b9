"""Cases of the compiled doorbell and wait that Python's twins cannot meet.

Both twins side by side: ``tests/links/test_doorbell.py`` and ``tests/core/test_waiter.py``.
"""

from __future__ import annotations

import inspect
import mmap
import os
from typing import Any, TypeVar

import pytest

from ppstream import native
from ppstream.core.waiter import PythonWaiter, Waiter
from ppstream.links.doorbell import Doorbell, PythonDoorbell, doorbell_bytes

SLOTS = 2
B = TypeVar("B", bound=PythonDoorbell)


def make(kind: type[B]) -> B:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    return kind(mmap.mmap(-1, doorbell_bytes(SLOTS)), SLOTS, fd)


def is_awake(waiter: Waiter) -> bool:
    """Only a wake of a sleeper writes the descriptor, which the look after the next finds."""
    found = []
    waiter.wake()
    for _ in range(2):
        PythonWaiter.wait(waiter, 0)  # takes any bell
        found.append(waiter.woken)
    return found == [True, False]


class BareBell(native.Bell):
    """The compiled half of a doorbell."""

    @property
    def words(self) -> Any:
        return self._words

    @words.setter
    def words(self, words: Any) -> None:
        self._words = words


class BareWaiter(native.Waiter):
    """The compiled half of a waiter."""

    def watch(self, *fds: Any) -> None:
        self._bells, self._fds = [], list(fds)


class SkippingDoorbell(Doorbell):
    """A doorbell that takes any index next."""

    def skip_to(self, index: int) -> None:
        self._taken = index


@pytest.mark.parametrize("limit_ns", [(1 << 63) - 1, -(1 << 63)])
def test_limits_beyond_the_clock_s_end_are_none_and_now(limit_ns: int) -> None:
    waiter, fd = Waiter(), os.eventfd(limit_ns > 0)
    waiter.register(fd)
    assert waiter.wait(limit_ns) == [fd] * (limit_ns > 0)
    waiter.close()
    os.close(fd)


@pytest.mark.parametrize("limit", [1 << 63, 1.5, "1"])
def test_what_is_no_limit_is_refused_and_nobody_sleeps(limit: Any) -> None:
    waiter = Waiter()
    with pytest.raises((OverflowError, TypeError)):
        waiter.wait(limit)
    assert is_awake(waiter)
    waiter.close()


def test_a_bell_of_python_is_refused_by_name() -> None:
    waiter, bell = Waiter(), make(PythonDoorbell)
    waiter.register_bell(bell)
    with pytest.raises(TypeError, match="takes compiled doorbells"):
        waiter.wait(0)
    assert is_awake(waiter)
    waiter.close()
    bell.close()


def test_numbers_that_are_no_descriptors_reach_no_memory() -> None:
    waiter = BareWaiter()
    with pytest.raises(TypeError, match="has lists"):
        waiter.wait(0)
    waiter.watch("x")
    with pytest.raises(TypeError, match="str"):
        waiter.wait(0)
    waiter.watch(-1)  # poll(2) skips it
    assert not waiter.wait(0)


def test_a_bell_without_memory_rings_nowhere() -> None:
    bell = BareBell()
    for call in (lambda: bell.ring(0, 1, 0), bell.pop, bell.sleep, bell.wake):
        with pytest.raises(ValueError, match="no memory"):
            call()
    for name in ("is_rung", "frames", "words"):
        with pytest.raises(ValueError, match="no memory"):
            getattr(bell, name)


WORDS = memoryview(bytearray(8 * 18))
NO_WORDS = {
    "too few": WORDS[: 8 * 16].cast("q"),
    "of 32 bits": WORDS.cast("i"),
    "bytes": WORDS,
    "unaligned": memoryview(bytearray(8 * 18 + 1))[1:].cast("q"),
    "to read only": memoryview(bytes(8 * 18)).cast("q"),
    "with holes": memoryview(bytearray(8 * 40)).cast("q")[::2],
    "no memory at all": [0] * 18,
}


@pytest.mark.parametrize("what", NO_WORDS)
def test_a_bell_takes_only_words(what: str) -> None:
    bell = BareBell()
    bell.words = WORDS.cast("q")
    with pytest.raises((ValueError, BufferError, TypeError)):
        bell.words = NO_WORDS[what]
    with pytest.raises(ValueError, match="no memory"):
        bell.pop()


def test_any_index_has_its_stamp_among_the_slots() -> None:
    bell = make(SkippingDoorbell)
    for index in (-1, -SLOTS, (1 << 62) + 1):
        bell.ring(index, 5, 0)
        bell.skip_to(index)
        assert bell.pop() == (index, 5)
    bell.close()


def test_every_member_of_the_core_is_one_that_python_names() -> None:
    pairs = [(native.Bell, make(PythonDoorbell)), (native.Waiter, PythonWaiter())]
    for core, twin in pairs:
        members = {name for name, one in vars(core).items() if inspect.isdatadescriptor(one)}
        assert members - {"is_rung", "frames"} <= set(vars(twin))
        twin.close()
