from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.ingest.intake import balances
from ppstream.ingest.ring import RingBank, SensorRing
from ppstream.ingest.rows import RowInput
from ppstream.ingest.stamp_filter import BACKLOG_NS, FUTURE_LIMIT_NS, JUMP_SAMPLES, NEVER_NS

RX = 123 * MS


def open_row(capacity: int = 16, **more: Any) -> RowInput:
    row = Input(config(stream(**more)), capacity).rows[0]
    row.open(7)
    return row


def open_ring(capacity: int = 16, **more: Any) -> SensorRing:
    return open_row(capacity, **more).reference


def held(ring: SensorRing) -> tuple[list[int], list[list[float]]]:
    """What the ring holds, oldest first, read as the resampling call reads it."""
    order = (int(ring._heads[ring._row]) + np.arange(int(ring._counts[ring._row]))) % ring._capacity
    return ring._stamps[order].tolist(), ring._values[order].tolist()


def push(ring: SensorRing, *times: float, rx_ns: int = RX) -> int:
    stamps = at_ms(*times)
    return ring.append(stamps, ramp(stamps), rx_ns)


def test_samples_are_held_in_order_with_their_values() -> None:
    ring = open_ring()
    assert push(ring, 1) == 1
    assert push(ring, 2, 3.5) == 2
    assert held(ring) == ([1 * MS, 2 * MS, round(3.5 * MS)], [[1, 1001], [2, 1002], [3.5, 1003.5]])
    assert (ring.newest_ns, ring.newest_rx_ns, ring.accepted) == (round(3.5 * MS), RX, 3)
    ring.check()


def test_the_caller_s_arrays_are_copied() -> None:
    ring = open_ring()
    stamps = at_ms(1)
    values = ramp(stamps)
    ring.append(stamps, values, RX)
    stamps[:], values[:] = 0, 0
    assert held(ring) == ([1 * MS], [[1, 1001]])


def test_read_only_arrays_of_a_message_are_taken() -> None:
    ring = open_ring()
    stamps = at_ms(1, 2)
    values = ramp(stamps)
    raw_stamps = np.frombuffer(stamps.tobytes(), np.int64)
    raw_values = np.frombuffer(values.tobytes(), np.float32).reshape(2, 2)
    assert ring.append(raw_stamps, raw_values, RX) == 2


def test_a_full_ring_forgets_the_oldest_and_counts_what_no_window_saw() -> None:
    ring = open_ring(capacity=4)
    push(ring, 1, 2, 3)
    push(ring, 4, 5, 6)  # across the end of the memory
    assert held(ring)[0] == at_ms(3, 4, 5, 6).tolist()
    assert ring.ledger.dropped == {"overwritten": 2}
    ring.check()


def test_a_message_longer_than_the_ring_leaves_its_newest_samples() -> None:
    ring = open_ring(capacity=4)
    push(ring, 1, 2)
    assert push(ring, *range(3, 13)) == 4
    assert held(ring)[0] == at_ms(9, 10, 11, 12).tolist()
    assert held(ring)[1][-1] == [12, 1012]
    assert ring.ledger.dropped == {"overwritten": 8}
    ring.check()


def test_a_message_longer_than_the_ring_is_judged_by_what_could_stay() -> None:
    ring = open_ring(capacity=4)
    assert push(ring, *range(100, 0, -1), 7, 8) == 3
    assert held(ring)[0] == at_ms(2, 7, 8).tolist()
    assert ring.ledger.dropped == {"overwritten": 98, "late": 1}
    ring.check()


def test_samples_that_a_window_used_are_not_lost_when_overwritten() -> None:
    ring = open_ring(capacity=4)
    push(ring, 1, 2, 3, 4)
    ring.settle(0, 4 * MS)
    push(ring, 5, 6, 7, 8)
    assert ring.ledger.as_dict() == {"received": 8, "used": 4, "dropped": {}, "in_flight": 4}


@pytest.mark.parametrize(
    ("stamps", "values"),
    [
        (at_ms(2, 3), ramp(at_ms(2))),
        (at_ms(2), ramp(at_ms(2), dim=3)),
        (at_ms(2), ramp(at_ms(2)).astype(np.float64)),
        (at_ms(2).astype(np.int32), ramp(at_ms(2))),
        (at_ms(2).astype(np.float64), ramp(at_ms(2))),
        (at_ms(2).reshape(1, 1), ramp(at_ms(2))),
        (at_ms(2), ramp(at_ms(2))[0]),
        (np.array(5, dtype=np.int64), ramp(at_ms(2))[0]),
    ],
)
def test_a_message_of_another_shape_or_dtype_is_refused_whole(stamps: Any, values: Any) -> None:
    ring = open_ring()
    push(ring, 1)
    assert ring.append(stamps, values, RX) == 0
    assert ring.ledger.dropped == {"shape": stamps.size}
    assert ring.count == 1
    ring.check()


def test_an_empty_message_is_nothing() -> None:
    ring = open_ring()
    assert push(ring) == 0
    assert ring.ledger.received == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_the_sample_that_is_not_finite_is_dropped(bad: float) -> None:
    ring = open_ring()
    stamps = at_ms(1, 2, 3)
    values = ramp(stamps)
    values[1, 1] = bad
    assert ring.append(stamps, values, RX) == 2
    assert held(ring)[0] == at_ms(1, 3).tolist()
    assert ring.ledger.dropped == {"non_finite": 1}
    ring.check()


def test_a_float64_sample_is_rounded_once_and_dropped_when_it_does_not_fit() -> None:
    ring = open_ring(dtype="float64")
    values = np.array([[0.1, 3.4e38], [0.1, 3.5e38], [1e300, 0], [1, 2]])
    assert ring.append(at_ms(1, 2, 3, 4), values, RX) == 2
    assert held(ring)[1] == np.array([[0.1, 3.4e38], [1, 2]], np.float32).tolist()
    assert ring.ledger.dropped == {"non_finite": 2}


def test_the_newest_stamp_again_is_a_duplicate_and_an_older_one_late() -> None:
    ring = open_ring()
    push(ring, 1, 5)
    assert push(ring, 5) == 0
    assert push(ring, 3) == 0
    assert push(ring, 5, 6, 6, 4, 7) == 2
    assert held(ring)[0] == at_ms(1, 5, 6, 7).tolist()
    assert ring.ledger.dropped == {"duplicate": 3, "late": 2}
    ring.check()


def test_a_stamp_from_the_future_is_dropped_and_does_not_block_the_present() -> None:
    ring = open_ring()
    push(ring, 1)
    assert push(ring, 2, 5000, 3) == 2
    assert held(ring)[0] == at_ms(1, 2, 3).tolist()
    assert ring.ledger.dropped == {"future": 1}


def test_holes_wider_than_a_window_bridges_are_counted_within_and_between_messages() -> None:
    ring = open_ring(max_gap_ms=5.0)
    push(ring, 100, 104, 109)  # nothing before the first one is no hole
    assert (ring.ledger.holes, ring.ledger.longest_hole_ns) == (0, 0)
    push(ring, 115)
    push(ring, 117, 129, 131, 138)
    assert (ring.ledger.holes, ring.ledger.longest_hole_ns) == (3, 12 * MS)
    ring.clear("closed")
    push(ring, 900)  # another history begins
    assert ring.ledger.holes == 3
    ring.check()


def test_streams_of_one_robot_share_its_clock() -> None:
    row = Input(config(stream("a"), stream("b"))).rows[0]
    row.open(7)
    push(row.rings["a"], 1)
    assert push(row.rings["b"], 5000) == 0  # its first sample, and yet from the future
    assert row.rings["b"].ledger.dropped == {"future": 1}


@pytest.mark.parametrize(("new_ms", "reason"), [(-100_000.0, "late"), (100_000.0, "future")])
@pytest.mark.parametrize("batch", [1, 7, 100])
def test_a_robot_s_clock_that_jumped_starts_the_row_anew(
    new_ms: float, reason: str, batch: int
) -> None:
    row = Input(config(stream("a"), stream("b"))).rows[0]
    row.open(7)
    a, b = row.rings.values()
    push(a, 1, 2, 3)
    push(b, 1, 2, 3)
    a.settle(0, 2 * MS)
    times = new_ms + np.arange(200)
    for begin in range(0, 200, batch):
        push(a, *times[begin : begin + batch])
    assert a.ledger.dropped[reason] == JUMP_SAMPLES
    assert held(a)[0] == at_ms(*times[JUMP_SAMPLES:]).tolist()
    assert b.count == 0
    assert (a.ledger.dropped["clock_jump"], b.ledger.dropped["clock_jump"]) == (1, 3)
    assert push(b, new_ms + 10) == 1
    a.check()
    b.check()


def test_one_broken_stream_does_not_empty_the_others() -> None:
    row = Input(config(stream("a"), stream("b"))).rows[0]
    row.open(7)
    a, b = row.rings.values()
    push(b, 50)
    for time in range(1, 3 * JUMP_SAMPLES):
        push(a, time, rx_ns=time * MS)
        push(b, 1, rx_ns=time * MS)
    assert "clock_jump" not in a.ledger.dropped
    assert b.ledger.dropped == {"late": 3 * JUMP_SAMPLES - 1}


def test_a_window_settles_what_it_used_and_what_it_passed_over() -> None:
    ring = open_ring()
    push(ring, 10, 20, 30, 40, 50, 60)
    assert ring.settle(35 * MS, 50 * MS) == 50 * MS
    # 30 brackets the first target from below; 60 is for a later window.
    assert ring.ledger.as_dict() == {
        "received": 6,
        "used": 3,
        "dropped": {"passed_over": 2},
        "in_flight": 1,
    }
    assert ring.settle(40 * MS, 55 * MS) == 50 * MS
    assert ring.ledger.used == 3  # none twice
    assert ring.settle(45 * MS, 60 * MS) == 60 * MS
    assert (ring.ledger.used, ring.ledger.in_flight) == (4, 0)
    ring.check()


def test_a_first_target_exactly_at_a_sample_needs_none_before_it() -> None:
    ring = open_ring()
    push(ring, 10, 20, 30)
    ring.settle(20 * MS, 30 * MS)
    assert (ring.ledger.used, ring.ledger.dropped) == (2, {"passed_over": 1})


def test_a_stream_that_fell_silent_has_its_held_sample_used() -> None:
    ring = open_ring()
    push(ring, 10, 20)
    assert ring.settle(100 * MS, 200 * MS) == 20 * MS
    assert (ring.ledger.used, ring.ledger.dropped) == (1, {"passed_over": 1})


def test_a_window_before_all_samples_uses_none() -> None:
    ring = open_ring()
    assert ring.settle(0, 5 * MS) is None
    push(ring, 10, 20)
    assert ring.settle(0, 5 * MS) is None
    assert ring.ledger.in_flight == 2


def test_a_row_belongs_to_one_session_at_a_time() -> None:
    row = open_row()
    push(row.reference, 1)
    assert (row.session, row.session_epoch, row.present) == (7, 0, True)
    with pytest.raises(AssertionError, match="session 8 opens a row that is 7's"):
        row.open(8)
    row.close()
    assert (row.session, row.present, row.reference.count) == (0, False, 0)
    assert row.reference.ledger.dropped == {"closed": 1}
    row.open(8)
    assert push(row.reference, -100_000) == 1  # another robot, another clock


def test_nobody_is_present_before_the_reference_stream_has_a_sample() -> None:
    row = Input(config(stream("fast", rate_hz=1000), stream("slow", rate_hz=10))).rows[0]
    row.open(7)
    push(row.rings["slow"], 1)
    assert not row.present
    push(row.rings["fast"], 1)
    assert row.present


def test_a_new_episode_empties_the_rings_and_keeps_the_clock() -> None:
    row = open_row()
    push(row.reference, 1, 2)
    row.reference.settle(0, 1 * MS)
    row.new_episode()
    assert (row.session, row.session_epoch, row.present) == (7, 1, False)
    assert row.reference.newest_ns == NEVER_NS
    assert row.reference.ledger.dropped == {"new_episode": 1}
    assert push(row.reference, 5000) == 0  # still the future of the same clock
    assert push(row.reference, 2) == 1
    assert balances([row])["joints"]["dropped"] == {"new_episode": 1, "future": 1}
    row.reference.check()


def test_samples_that_stay_late_are_taken_whatever_else_is_wrong_with_their_message() -> None:
    row = two_rings(SensorRing, 16, real_time=True)
    ring, ones = row.reference, np.ones((2, 1), np.float32)
    ring.append(at_ms(0), ones[:1], 0)
    ring.append(at_ms(1), ones[:1], 2 * STALE_MS * MS)  # a backlog begins
    rx_ns = 2 * STALE_MS * MS + BACKLOG_NS + 1  # and goes on for too long to be one
    assert ring.append(at_ms(2, 0), ones, rx_ns) == 1
    assert ring.ledger.dropped == {"stale": 1, "late": 1}
    ring.check()


# ---- properties ------------------------------------------------------------------------------


class ListRing:
    """The ring as a plain list of samples, each with what became of it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.samples: list[tuple[int, float]] = []
        self.waiting: set[int] = set()
        self.counts = dict.fromkeys(("used", "passed_over", "overwritten", "late", "duplicate"), 0)
        self.counts["non_finite"] = 0

    def append(self, stamp: int, value: float) -> None:
        newest = self.samples[-1][0] if self.samples else NEVER_NS
        if not np.isfinite(value):
            self.counts["non_finite"] += 1
        elif stamp == newest:
            self.counts["duplicate"] += 1
        elif stamp < newest:
            self.counts["late"] += 1
        else:
            self.samples.append((stamp, value))
            self.waiting.add(stamp)
            if len(self.samples) > self.capacity:
                self._end(self.samples.pop(0)[0], "overwritten")

    def cut(self, first: int, end: int) -> None:
        before = [stamp for stamp, _ in self.samples if stamp < first]
        at_first = any(stamp == first for stamp, _ in self.samples)
        needed_from = before[-1] if before and not at_first else first
        for stamp, _ in self.samples:
            if stamp <= end:
                self._end(stamp, "used" if stamp >= needed_from else "passed_over")

    def _end(self, stamp: int, how: str) -> None:
        if stamp in self.waiting:
            self.waiting.remove(stamp)
            self.counts[how] += 1


SAMPLES = st.lists(
    st.tuples(st.integers(-4, 30), st.sampled_from([1.0, 2.0, -3.0, np.nan, np.inf])),
    max_size=7,  # too few to be taken for a clock that jumped
)
CUTS = st.tuples(st.integers(0, 25), st.integers(0, 10))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 9), st.lists(SAMPLES | CUTS, max_size=25))
def test_a_ring_equals_a_plain_list_whatever_comes_and_its_ledger_balances(
    capacity: int, steps: list[Any]
) -> None:
    ring = open_ring(capacity, dim=1)
    model = ListRing(capacity)
    base = 0
    for step in steps:
        if isinstance(step, tuple):
            first, length = step
            ring.settle(base + first, base + first + length)
            model.cut(base + first, base + first + length)
        else:
            stamps = np.array([base + stamp for stamp, _ in step], dtype=np.int64)
            values = np.array([[value] for _, value in step], dtype=np.float32).reshape(-1, 1)
            ring.append(stamps, values, RX)
            model.counts["overwritten"] += max(0, len(step) - capacity)
            for stamp, value in step[-capacity:]:
                model.append(base + stamp, value)
            base += 6
        ring.check()
    assert held(ring) == ([s for s, _ in model.samples], [[v] for _, v in model.samples])
    dropped = {reason: n for reason, n in model.counts.items() if n and reason != "used"}
    assert (ring.ledger.used, ring.ledger.dropped) == (model.counts["used"], dropped)
    assert ring.ledger.in_flight == len(model.waiting)


@settings(max_examples=200, deadline=None)
@given(st.lists(SAMPLES, max_size=12), st.integers(1, 8))
def test_how_samples_are_grouped_into_messages_does_not_matter(
    messages: list[list[tuple[int, float]]], size: int
) -> None:
    samples = [
        ((stamp + 6 * index) * MS, value)
        for index, message in enumerate(messages)
        for stamp, value in message
    ]
    rings = open_ring(8, dim=1), open_ring(8, dim=1)
    for ring, step in zip(rings, (size, 1), strict=True):
        for begin in range(0, len(samples), step):
            part = samples[begin : begin + step]
            stamps = np.array([stamp for stamp, _ in part], dtype=np.int64)
            ring.append(stamps, np.array([[v] for _, v in part], dtype=np.float32), RX)
    assert held(rings[0]) == held(rings[1])
    assert rings[0].ledger.as_dict() == rings[1].ledger.as_dict()


class SlowRing(SensorRing):
    """Judges a message in which something is wrong sample by sample: the rule, plainly."""

    def _append_some(self, stamps: Any, values: Any, rx_ns: int) -> int:
        clock, last_ns = self._clock, stamps.item(-1)
        if last_ns > self.newest_ns and clock.is_stale(last_ns, rx_ns):
            self.ledger.reject("stale", len(stamps))
            return 0
        taken = 0
        for index, stamp_ns in enumerate(stamps.tolist()):
            reason = None
            if not np.isfinite(values[index]).all():
                reason = "non_finite"
            elif stamp_ns <= self.newest_ns:
                reason = "duplicate" if stamp_ns == self.newest_ns else "late"
            elif clock.is_stale(stamp_ns, rx_ns):
                reason = "stale"
            elif not clock.accepts(stamp_ns, rx_ns):
                reason = "future"
            if reason is None:
                taken += self._store(stamps[index : index + 1], values[index : index + 1], rx_ns)
                continue
            self.ledger.reject(reason, 1)
            if reason in ("late", "future"):
                clock.rejects()
        return taken


LIMIT_MS = FUTURE_LIMIT_NS // MS
STALE_MS = 300
#: Where a run of samples begins, beside the newest before it, and how far apart they are.
OFFSETS = st.sampled_from([-5_000_000, -2000, -STALE_MS, -7, -1, 0, 1, 10, 700, LIMIT_MS, 90_000])
STEPS = st.sampled_from([-40, -1, 0, 1, 5, 600, LIMIT_MS - 1, LIMIT_MS, LIMIT_MS + 1, 1 << 32])
RUNS = st.lists(st.tuples(OFFSETS, STEPS, st.integers(1, 60)), min_size=1, max_size=4)
#: Runs, one behind the other or mixed; each n-th sample bad; time until it arrives; which ring.
MESSAGES = st.tuples(
    RUNS,
    st.booleans(),
    st.sampled_from([0, 0, 1, 2, 7]),
    st.sampled_from([0, 5, 400, BACKLOG_NS // MS + 1, 11_000]),
    st.booleans(),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=8), st.sampled_from([3, 100, 300]), st.booleans())
def test_a_message_judged_by_arrays_is_judged_as_sample_by_sample(
    messages: list[Any], capacity: int, real_time: bool
) -> None:
    both = [two_rings(kind, capacity, real_time) for kind in (SensorRing, SlowRing)]
    rx_ns, newest_ns = 500 * MS, 0
    for runs, mixed, bad_every, passed_ms, other in messages:
        rx_ns += passed_ms * MS
        parts = [
            newest_ns + (offset + step * np.arange(count, dtype=np.int64)) * MS
            for offset, step, count in runs
        ]
        stamps = np.concatenate(parts)
        if mixed:
            stamps = stamps[np.argsort(np.concatenate([np.arange(len(part)) for part in parts]))]
        values = np.ones((len(stamps), 1), np.float32)
        values[:: bad_every or len(stamps) + 1] = np.nan if bad_every else 1
        taken = [row.rings["b" if other else "a"].append(stamps, values, rx_ns) for row in both]
        assert taken[0] == taken[1]
        clocks = [{**vars(row.clock), "_on_jump": None} for row in both]
        assert clocks[0] == clocks[1]
        for name in ("a", "b"):
            ours, slow = both[0].rings[name], both[1].rings[name]
            assert held(ours) == held(slow)
            assert ours.ledger.as_dict() == slow.ledger.as_dict()
            assert ours.ledger.holes == slow.ledger.holes
            assert ours.ledger.longest_hole_ns == slow.ledger.longest_hole_ns
            ours.check()
        newest_ns = max(newest_ns, both[0].rings["a"].newest_ns)


def two_rings(kind: type[SensorRing], capacity: int, real_time: bool) -> RowInput:
    case = config(stream("a", dim=1), stream("b", dim=1))
    banks = {one.name: RingBank(one, 1, capacity) for one in case.streams}
    row = RowInput(banks, 0, "a", STALE_MS * MS)
    row.rings = {name: kind(bank, 0, row.clock) for name, bank in banks.items()}
    row.open(7, is_real_time=real_time)
    return row
