import sys

import pytest

from ppstream.core import interpreter
from ppstream.core.clock import ManualClock
from ppstream.core.interpreter import PAUSE_S, PIECE_NS, SWITCH_INTERVAL_S, Pieces, short_turns


def test_a_pause_is_made_when_a_piece_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(5)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(10 * PIECE_NS)  # the sleep is no part of the next piece

    monkeypatch.setattr(interpreter, "now_ns", clock)
    monkeypatch.setattr(interpreter.time, "sleep", sleep)
    work = Pieces()
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


@pytest.mark.parametrize(("before_s", "inside_s"), [(0.005, SWITCH_INTERVAL_S), (1e-4, 1e-4)])
def test_short_turns_end_with_their_block(before_s: float, inside_s: float) -> None:
    ours_s = sys.getswitchinterval()
    sys.setswitchinterval(before_s)
    try:
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(inside_s, abs=2e-6)
        assert sys.getswitchinterval() == pytest.approx(before_s, abs=2e-6)
    finally:
        sys.setswitchinterval(ours_s)
