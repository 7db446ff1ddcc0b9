import pytest

from ppstream import pieces
from ppstream.core.clock import ManualClock
from ppstream.pieces import PAUSE_S, PIECE_NS, Pieces


def test_a_pause_is_made_when_a_piece_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(5)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(10 * PIECE_NS)  # the sleep is no part of the next piece

    monkeypatch.setattr(pieces, "now_ns", clock)
    monkeypatch.setattr(pieces.time, "sleep", sleep)
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
