from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress

import pytest

from ppstream.core import interpreter
from ppstream.core.clock import ManualClock, now_ns
from ppstream.core.interpreter import (
    CONTROL_SWITCH_INTERVAL_S,
    EVERY_NS,
    OVERDUE_NS,
    PAUSE_S,
    PIECE_NS,
    GcControl,
    InterpreterPauses,
    as_guest,
    freeze_garbage,
    set_switch_interval,
    short_turns,
    uncollected,
)


def test_a_pause_is_made_when_a_piece_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(5)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(10 * PIECE_NS)  # the sleep is no part of the next piece

    monkeypatch.setattr(interpreter, "now_ns", clock)
    monkeypatch.setattr(interpreter.time, "sleep", sleep)
    work = InterpreterPauses()
    clock.advance(PIECE_NS - 1)
    work.pause()
    assert slept == []
    clock.advance(1)
    work.pause()
    work.pause()
    assert slept == [PAUSE_S]
    clock.advance(PIECE_NS)
    work.pause()
    assert len(slept) == 2


@pytest.mark.parametrize(
    ("before_s", "inside_s"), [(0.005, CONTROL_SWITCH_INTERVAL_S), (1e-5, 1e-5)]
)
def test_short_turns_end_with_their_block(before_s: float, inside_s: float) -> None:
    ours_s = sys.getswitchinterval()
    sys.setswitchinterval(before_s)
    try:
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(inside_s, abs=2e-6)
        assert sys.getswitchinterval() == pytest.approx(before_s, abs=2e-6)
    finally:
        sys.setswitchinterval(ours_s)


def test_a_guest_leaves_the_interpreter_as_it_was() -> None:
    ours_s = sys.getswitchinterval()
    for was_frozen in (True, False):
        gc.unfreeze()
        if was_frozen:
            gc.freeze()
        with as_guest():
            set_switch_interval(1e-4)
            freeze_garbage()
            assert gc.get_freeze_count() > 0
        assert sys.getswitchinterval() == ours_s
        assert (gc.get_freeze_count() > 0) == was_frozen
    gc.freeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_wait_until_a_loop_offers_time_and_no_longer() -> None:
    with GcControl() as garbage:
        assert not gc.isenabled()
        lost = weakref.ref(Node())
        garbage.offer(now_ns(), EVERY_NS)
        assert lost() is not None, "it is not due yet"
        garbage.offer(now_ns() + EVERY_NS, EVERY_NS)
        assert lost() is None
        assert garbage.collections == 1
    assert gc.isenabled()


def test_a_collection_that_does_not_fit_waits_but_not_for_ever() -> None:
    with GcControl() as garbage:
        garbage.longest_ns = 1000
        garbage.offer(now_ns() + EVERY_NS, 1999)
        assert garbage.collections == 0
        garbage.offer(now_ns() + OVERDUE_NS, 1999)
        assert garbage.collections == 1


@pytest.mark.parametrize("was_frozen", [True, False])
def test_what_exists_before_is_not_looked_at_again(*, was_frozen: bool) -> None:
    gc.unfreeze()
    if was_frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        with GcControl():
            assert gc.get_freeze_count() > before
        assert (gc.get_freeze_count() > 0) == was_frozen
    finally:
        gc.freeze()


def test_nothing_is_collected_while_a_program_imports() -> None:
    with suppress(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("without", [GcControl, uncollected])
def test_who_has_switched_it_off_finds_it_off_again(
    without: Callable[[], AbstractContextManager[object]],
) -> None:
    gc.disable()
    try:
        with without():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_two_loops_of_a_process_leave_it_as_it_was_when_the_last_ends() -> None:
    ours_s = sys.getswitchinterval()
    gc.unfreeze()
    first, second = ExitStack(), ExitStack()
    try:
        for loop in (first, second):
            loop.enter_context(short_turns())
            loop.enter_context(GcControl())
        first.close()
        assert sys.getswitchinterval() == pytest.approx(CONTROL_SWITCH_INTERVAL_S, abs=2e-6)
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        second.close()
        assert sys.getswitchinterval() == ours_s
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        second.close()
        first.close()
        gc.freeze()
