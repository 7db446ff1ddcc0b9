import pytest

from ppstream.core.clock import ManualClock
from ppstream.observe import gil_pauses
from ppstream.observe.gil_pauses import PAUSE_S, PIECE_NS, Pieces


def test_a_pause_is_made_when_a_piece_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(5)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(10 * PIECE_NS)  # the sleep is no part of the next piece

    monkeypatch.setattr(gil_pauses, "now_ns", clock)
    monkeypatch.setattr(gil_pauses.time, "sleep", sleep)
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
