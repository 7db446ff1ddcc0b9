"""An envelope is expected as those before it came: behind one another, or alone."""

from __future__ import annotations

from ppstream.pipeline.device.in_flight import Rhythm

GAP, ALONE = 200, 650


def settled(rhythm: Rhythm, begin: int, count: int = 40, gap: int = GAP) -> int:
    """Envelopes that each stood queued before the one before was done; when the last was."""
    for n in range(count):
        rhythm.done(begin + n * gap - 1000, begin + n * gap)
    return begin + (count - 1) * gap


def test_one_that_stands_queued_comes_a_usual_gap_after_the_one_before() -> None:
    rhythm = Rhythm()
    last = settled(rhythm, 10_000)
    assert abs(rhythm.due_ns(last - 500) - (last + GAP)) <= 3


def test_one_alone_comes_a_usual_time_after_it_was_queued() -> None:
    rhythm = Rhythm()
    last = settled(rhythm, 10_000)
    for n in range(1, 40):
        rhythm.done(last + n * 5000, last + n * 5000 + ALONE)
    queued = last + 40 * 5000
    assert abs(rhythm.due_ns(queued) - (queued + ALONE)) <= 3


def test_a_pause_is_no_gap() -> None:
    rhythm = Rhythm()
    last = settled(rhythm, 10_000)
    rhythm.done(last + 10**9, last + 10**9 + ALONE)  # queued long after
    last += 10**9 + ALONE
    assert abs(rhythm.due_ns(last - 1) - (last + GAP)) <= 3


def test_one_late_envelope_moves_little_and_many_move_it_there() -> None:
    rhythm = Rhythm()
    last = settled(rhythm, 10_000)
    rhythm.done(last - 500, last + 5 * GAP)
    assert rhythm.due_ns(last) <= last + 5 * GAP + 2 * GAP
    last = settled(rhythm, last + 6 * GAP, gap=300)
    assert abs(rhythm.due_ns(last - 500) - (last + 300)) <= 3


def test_an_outlier_does_not_make_those_behind_it_late() -> None:
    rhythm = Rhythm()
    last = settled(rhythm, 10_000)
    rhythm.done(last - 500, last + 100 * GAP)
    last += 100 * GAP
    assert last < rhythm.due_ns(last - 500) <= last + 2 * GAP + 250


def test_before_anything_is_known_it_is_due_at_once() -> None:
    assert Rhythm().due_ns(1234) == 1234
