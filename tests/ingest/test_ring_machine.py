from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from stream_cases import MS, stream

from ppstream.ingest import sample_ledger as why
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import Commitment, RowInput
from ppstream.ingest.stamp_filter import (
    BACKLOG_NS,
    BEST_NS,
    FUTURE_LIMIT_NS,
    JUMP_SAMPLES,
    NEVER_NS,
)
from ppstream.recording.items import RowTap

REFERENCE, OTHER = "joints", "force"
GAP_NS = 5 * MS
STALE_NS = 300 * MS
START_NS = 100 * BEST_NS
STALLS_MS = (400, BACKLOG_NS // MS + 1)  # any is longer than STALE_NS
ROW, NEIGHBOUR = 1, 0

Sample = tuple[int, float]


class PlainStream:
    """A stream as a list of samples, and what became of each that it does not hold."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[Sample] = []
        self.waiting: set[int] = set()  # stamps of those held that no window reached yet
        self.counts: Counter[str] = Counter()
        self.holes_ns: list[int] = []
        self.accepted = 0
        self.newest_rx_ns = NEVER_NS

    @property
    def newest_ns(self) -> int:
        return self.held[-1][0] if self.held else NEVER_NS

    def take(self, sample: Sample, rx_ns: int) -> None:
        if self.held and sample[0] - self.newest_ns > GAP_NS:
            self.holes_ns.append(sample[0] - self.newest_ns)
        self.held.append(sample)
        self.waiting.add(sample[0])
        self.accepted += 1
        self.newest_rx_ns = rx_ns
        if len(self.held) > self.capacity:
            self.end(self.held.pop(0)[0], why.OVERWRITTEN)

    def end(self, stamp_ns: int, fate: str) -> None:
        if stamp_ns in self.waiting:
            self.waiting.remove(stamp_ns)
            self.counts[fate] += 1

    def cut(self, first_ns: int, end_ns: int) -> int | None:
        reached = [stamp for stamp, _ in self.held if stamp <= end_ns]
        bracket_ns = max((stamp for stamp in reached if stamp <= first_ns), default=first_ns)
        for stamp in reached:
            self.end(stamp, "used" if stamp >= bracket_ns else why.PASSED_OVER)
        return max(reached, default=None)

    def clear(self, reason: str) -> None:
        self.counts[reason] += len(self.waiting)
        self.held, self.waiting, self.newest_rx_ns = [], set(), NEVER_NS


class PlainRow:
    """A robot's streams, judged sample by sample by the one clock that they share."""

    def __init__(self, capacity: int) -> None:
        self.streams = {name: PlainStream(capacity) for name in (REFERENCE, OTHER)}
        self.told: list[Any] = []  # what a recorder of the row hears
        self.commitment: Commitment | None = None
        self.restart(is_real_time=True)

    def restart(self, *, is_real_time: bool) -> None:
        self.is_real_time = is_real_time
        self.lead_ns: int | None = None  # the highest of all accepted
        self.best_ns = NEVER_NS  # the same since the last backlog that did not end
        self.implausible = 0  # samples in a row
        self.stale_since_ns: int | None = None

    def append(self, name: str, samples: Sequence[Sample], rx_ns: int) -> int:
        one = self.streams[name]
        self.told.append((name, [stamp for stamp, _ in samples], rx_ns))
        unseen = max(0, len(samples) - one.capacity)
        one.counts[why.OVERWRITTEN] += unseen
        last_ns = samples[-1][0]
        if last_ns > one.newest_ns and self.is_stale(last_ns, rx_ns):
            one.counts[why.STALE] += len(samples) - unseen  # they came the same way
            return 0
        return sum(self.append_one(one, sample, rx_ns) for sample in samples[unseen:])

    def append_one(self, one: PlainStream, sample: Sample, rx_ns: int) -> bool:
        stamp_ns, value = sample
        reason = why.NON_FINITE if not np.isfinite(value) else self.fault(one, stamp_ns, rx_ns)
        if reason is None:
            one.take(sample, rx_ns)
            return True
        one.counts[reason] += 1
        if reason in (why.LATE, why.FUTURE):
            self.implausible += 1
            if self.implausible == JUMP_SAMPLES:
                self.clear(why.CLOCK_JUMP)
                self.restart(is_real_time=self.is_real_time)
        return False

    def fault(self, one: PlainStream, stamp_ns: int, rx_ns: int) -> str | None:
        if stamp_ns <= one.newest_ns:
            return why.DUPLICATE if stamp_ns == one.newest_ns else why.LATE
        lead_ns = stamp_ns - rx_ns
        if self.is_stale(stamp_ns, rx_ns):
            return why.STALE
        if self.lead_ns is None:
            self.lead_ns = lead_ns
        elif self.is_real_time and lead_ns > self.lead_ns + FUTURE_LIMIT_NS:
            return why.FUTURE
        self.lead_ns = max(self.lead_ns, lead_ns)
        self.best_ns = max(self.best_ns, lead_ns)
        self.implausible, self.stale_since_ns = 0, None
        return None

    def is_stale(self, stamp_ns: int, rx_ns: int) -> bool:
        lead_ns = stamp_ns - rx_ns
        if not self.is_real_time or lead_ns >= self.best_ns - STALE_NS:
            return False
        if self.stale_since_ns is None:
            self.stale_since_ns = rx_ns
        if rx_ns - self.stale_since_ns <= BACKLOG_NS:
            return True
        self.best_ns = lead_ns  # no backlog: this is how long samples travel now
        return False

    def clear(self, reason: str) -> None:
        self.told.append(reason)
        self.commitment = None
        for one in self.streams.values():
            one.clear(reason)


class Recorder:
    """Writes down what a row's tap tells."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def samples(
        self, robot: str, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int
    ) -> None:
        assert len(stamps) == len(values)
        self.told.append((stream, stamps.tolist(), rx_ns))

    def cleared(self, robot: str, reason: str) -> None:
        self.told.append(reason)


names = st.sampled_from([REFERENCE, OTHER])
#: Milliseconds beside what the robot's clock shows, or beside the newest stamp.
offsets = st.lists(st.integers(-6, 8), min_size=1, max_size=7)
offsets |= offsets.map(sorted)


class RowKeepsTheNewestOfItsRobot(RuleBasedStateMachine):
    """A robot's two rings beside a plain list of each."""

    @initialize(capacity=st.sampled_from([1, 2, 3, 5, 8, 64]))
    def begin(self, capacity: int) -> None:
        streams = [
            stream(name, dim=1, max_gap_ms=GAP_NS / MS, reference=name == REFERENCE)
            for name in (REFERENCE, OTHER)
        ]
        self.banks = {one.name: RingBank(one, 2, capacity) for one in streams}
        neighbour = RowInput(self.banks, NEIGHBOUR, REFERENCE, STALE_NS)
        neighbour.open(1)
        for ring in neighbour.rings.values():
            ring.append(*arrays([(stamp, 0.5) for stamp in range(capacity)]), START_NS)
        self.row = RowInput(self.banks, ROW, REFERENCE, STALE_NS)
        self.model = PlainRow(capacity)
        self.recorder = Recorder()
        for ring in self.row.rings.values():
            ring.tap = RowTap(self.recorder, self.row, ROW)
        self.rx_ns = START_NS
        self.robot_ns = 0  # what its clock shows beside ours
        self.values = 0.0
        self.identity = (0, 0, 0, 0)  # session, episode, instruction, its count
        self.open(2, True)

    def is_open(self) -> bool:
        return self.identity[0] != 0

    def is_early(self) -> bool:
        """While it is, the best lead of late is the best of all."""
        return self.rx_ns < START_NS + BEST_NS - sum(STALLS_MS) * MS

    # ---- whose the row is ------------------------------------------------------------------

    @rule(session=st.integers(1, 9), is_real_time=st.sampled_from([True, True, False]))
    def open(self, session: int, is_real_time: bool) -> None:
        if self.is_open():
            with pytest.raises(AssertionError, match="opens a row that is"):
                self.row.open(session, is_real_time=is_real_time)
            return
        self.row.open(session, is_real_time=is_real_time)
        self.model.restart(is_real_time=is_real_time)
        self.identity = (session, 0, 0, 0)

    @precondition(is_open)
    @rule()
    def close(self) -> None:
        self.row.close()
        self.model.clear(why.CLOSED)
        self.identity = (0, 0, 0, 0)

    @rule()
    def new_episode(self) -> None:
        self.row.new_episode()
        self.model.clear(why.NEW_EPISODE)
        session, episode, *instruction = self.identity
        self.identity = (session, episode + 1, *instruction)

    @precondition(is_open)
    @rule(text=st.integers(1, 3))
    def the_robot_is_given_an_instruction_and_says_what_it_executes(self, text: int) -> None:
        self.row.instruction_id = text
        self.row.conditioning_epoch += 1
        said = Commitment(self.robot_ns, MS, self.robot_ns + MS, 0, np.zeros((1, 1), np.float32))
        self.row.commitment = self.model.commitment = said
        session, episode, _, count = self.identity
        self.identity = (session, episode, text, count + 1)

    # ---- time ------------------------------------------------------------------------------

    @rule(passed_ms=st.integers(0, 5) | st.just(STALLS_MS[0]))
    def time_passes(self, passed_ms: int) -> None:
        self.rx_ns += (passed_ms if self.is_early() else min(passed_ms, 5)) * MS

    @rule(by_ms=st.sampled_from([-100_000, 100_000]))
    def the_robot_s_clock_jumps(self, by_ms: int) -> None:
        self.robot_ns += by_ms * MS

    # ---- samples ---------------------------------------------------------------------------

    def send(self, name: str, stamps: Sequence[int], bad_at: int | None = None) -> None:
        values = self.values + np.arange(len(stamps))
        self.values += len(stamps)
        if bad_at is not None:
            values[bad_at % len(stamps)] = np.nan
        samples = list(zip(stamps, values.tolist(), strict=True))
        taken = self.row.rings[name].append(*arrays(samples), self.rx_ns)
        assert taken == self.model.append(name, samples, self.rx_ns)

    @rule(name=names, count=st.integers(1, 12))
    def samples_of_now_arrive_in_order(self, name: str, count: int) -> None:
        now_ns = self.rx_ns + self.robot_ns
        self.send(name, [now_ns + (index - count) * MS // 2 for index in range(count)])

    @rule(name=names, offsets_ms=offsets, bad_at=st.none() | st.integers(0, 6))
    def samples_of_now_arrive_mixed(
        self, name: str, offsets_ms: list[int], bad_at: int | None
    ) -> None:
        now_ns = self.rx_ns + self.robot_ns
        self.send(name, [now_ns + offset * MS for offset in offsets_ms], bad_at)

    @precondition(lambda self: self.is_early() and self.model.streams[REFERENCE].held)
    @rule(
        late_ms=st.sampled_from([(0,), STALLS_MS[:1], STALLS_MS]),
        offsets_ms=offsets,
        again=st.booleans(),
    )
    def samples_arrive_that_continue_the_newest(
        self, late_ms: tuple[int, ...], offsets_ms: list[int], again: bool
    ) -> None:
        newest_ns = self.model.streams[REFERENCE].newest_ns
        offsets_ms = [*offsets_ms, 0] if again else offsets_ms
        for passed_ms in late_ms:
            self.rx_ns += passed_ms * MS
            self.send(REFERENCE, [newest_ns + offset * MS for offset in offsets_ms])

    @precondition(lambda self: self.model.lead_ns is not None)
    @rule(name=names, is_future=st.booleans(), beyond_ns=st.integers(0, 1))
    def a_sample_arrives_at_a_limit(self, name: str, is_future: bool, beyond_ns: int) -> None:
        assert self.model.lead_ns is not None
        if is_future:
            lead_ns = self.model.lead_ns + FUTURE_LIMIT_NS + beyond_ns
        else:
            lead_ns = self.model.best_ns - STALE_NS - beyond_ns
        self.send(name, [self.rx_ns + lead_ns])
        self.rx_ns += 20 * MS  # later messages are on one side of a limit with all their samples

    @rule(
        name=names,
        count=st.integers(JUMP_SAMPLES - 1, JUMP_SAMPLES + 2),
        size=st.sampled_from([1, 7, 60]),
    )
    def many_samples_arrive(self, name: str, count: int, size: int) -> None:
        now_ns = self.rx_ns + self.robot_ns
        stamps = [now_ns + index * MS // 10 for index in range(count)]
        for begin in range(0, count, size):
            self.send(name, stamps[begin : begin + size])

    @rule(name=names, what=st.sampled_from(["dtype", "width", "length", "nothing", "refused"]))
    def what_is_no_sample_is_refused_whole(self, name: str, what: str) -> None:
        ring, counts = self.row.rings[name], self.model.streams[name].counts
        stamps, values = arrays([(self.rx_ns + index, 1.0) for index in range(3)])
        if what == "refused":  # before the ring
            ring.refuse(why.RATE, 3)
            counts[why.RATE] += 3
            return
        if what == "nothing":
            stamps, values = stamps[:0], values[:0]
        elif what == "dtype":
            values = values.astype(np.float64)
        else:
            values = np.ones((3, 2) if what == "width" else (2, 1), np.float32)
        assert ring.append(stamps, values, self.rx_ns) == 0
        counts[why.SHAPE] += len(stamps)

    # ---- windows ---------------------------------------------------------------------------

    @rule(end_ms=st.integers(-9, 9) | st.just(0), span_ms=st.integers(0, 9))
    def a_window_is_cut(self, end_ms: int, span_ms: int) -> None:
        newest_ns = self.model.streams[REFERENCE].newest_ns
        end_ns = (self.rx_ns if newest_ns == NEVER_NS else newest_ns) + end_ms * MS
        for name, ring in self.row.rings.items():
            newest_used_ns = self.model.streams[name].cut(end_ns - span_ms * MS, end_ns)
            assert ring.settle(end_ns - span_ms * MS, end_ns) == newest_used_ns

    # ---- what holds at every moment ----------------------------------------------------------

    @invariant()
    def the_rings_hold_the_newest_samples_in_order(self) -> None:
        for name, one in self.model.streams.items():
            ring = self.row.rings[name]
            assert held(self.banks[name], ROW) == one.held
            assert (ring.count, ring.accepted) == (len(one.held), one.accepted)
            assert (ring.newest_ns, ring.newest_rx_ns) == (one.newest_ns, one.newest_rx_ns)

    @invariant()
    def a_sample_lies_in_the_slot_of_its_number(self) -> None:
        for name, one in self.model.streams.items():
            bank, oldest = self.banks[name], self.row.rings[name].accepted - len(one.held)
            for number, (stamp_ns, _) in enumerate(one.held, oldest):
                assert int(bank.stamps_ns[ROW, number % bank.capacity]) == stamp_ns

    @invariant()
    def every_sample_is_accounted_for_with_its_reason(self) -> None:
        for name, one in self.model.streams.items():
            ring = self.row.rings[name]
            ring.check()
            dropped = {reason: n for reason, n in one.counts.items() if n and reason != "used"}
            assert ring.ledger.as_dict() == {
                "received": one.counts.total() + len(one.waiting),
                "used": one.counts["used"],
                "dropped": dropped,
                "in_flight": len(one.waiting),
            }
            assert ring.accepted - ring.settled == len(one.waiting)
            holes = (ring.ledger.holes, ring.ledger.longest_hole_ns)
            assert holes == (len(one.holes_ns), max(one.holes_ns, default=0))

    @invariant()
    def the_row_is_its_session_s(self) -> None:
        row = self.row
        identity = row.session, row.session_epoch, row.instruction_id, row.conditioning_epoch
        assert identity == self.identity
        has_reference = bool(self.model.streams[REFERENCE].held)
        assert row.present == (self.is_open() and has_reference)
        assert row.commitment is self.model.commitment

    @invariant()
    def the_tap_hears_all_that_arrives_and_each_new_beginning(self) -> None:
        assert self.recorder.told == self.model.told

    @invariant()
    def the_neighbour_keeps_its_samples(self) -> None:
        for bank in self.banks.values():
            assert held(bank, NEIGHBOUR) == [(stamp, 0.5) for stamp in range(bank.capacity)]


def arrays(samples: Sequence[Sample]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    stamps = np.array([stamp for stamp, _ in samples], np.int64)
    return stamps, np.array([value for _, value in samples], np.float32).reshape(-1, 1)


def held(bank: RingBank, row: int) -> list[Sample]:
    """What a ring holds, oldest first, read as the resampling call reads it."""
    order = [(int(bank.head[row]) + at) % bank.capacity for at in range(int(bank.count[row]))]
    return list(
        zip(bank.stamps_ns[row][order].tolist(), bank.values[row][order, 0].tolist(), strict=True)
    )


TestRow = RowKeepsTheNewestOfItsRobot.TestCase
TestRow.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
