from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_rig import Wire
from stream_cases import MS, Input, at_ms, config, held, ramp, stream
from twin_rows import numbers_of, state_of

from ppstream import native
from ppstream.config.schema import ImageConfig
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ProtocolError
from ppstream.ingest.intake import build_intake
from ppstream.ingest.ring import RingBank, SensorRing
from ppstream.ingest.rows import RowInput
from ppstream.ingest.stamp_filter import BACKLOG_NS, FUTURE_LIMIT_NS, StampFilter
from ppstream.wire.message_memory import LargeMessage

RX = 123 * MS


def open_row(capacity: int = 16, **more: Any) -> RowInput:
    row = Input(config(stream(**more)), capacity).rows[0]
    row.open(7)
    return row


def open_ring(capacity: int = 16, **more: Any) -> SensorRing:
    return open_row(capacity, **more).reference


def push(ring: SensorRing, *times: float, rx_ns: int = RX) -> int:
    stamps = at_ms(*times)
    return ring.append(stamps, ramp(stamps), rx_ns)


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


def test_samples_that_stay_late_are_taken_whatever_else_is_wrong_with_their_message() -> None:
    row = two_rings(SensorRing, 16, real_time=True)
    ring, ones = row.reference, np.ones((2, 1), np.float32)
    ring.append(at_ms(0), ones[:1], 0)
    ring.append(at_ms(1), ones[:1], 2 * STALE_MS * MS)  # a backlog begins
    rx_ns = 2 * STALE_MS * MS + BACKLOG_NS + 1  # and goes on for too long to be one
    assert ring.append(at_ms(2, 0), ones, rx_ns) == 1
    assert ring.ledger.dropped == {"stale": 1, "late": 1}
    ring.check()


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("on_their_way_s", [(5, 0, 0), (0, 3, 5)])
def test_samples_that_a_robot_waits_for_are_taken_however_long_they_were_on_their_way(
    *, is_asked: bool, on_their_way_s: tuple[int, ...]
) -> None:
    """As the first one of a session, which the gateway keeps until the policy has its prompt."""
    rate: dict[str, Any] = {"rate_hz": None, "max_request_hz": 50.0} if is_asked else {}
    (row,) = build_intake(config(stream("q", reference=True, **rate))).rows
    row.open(7)
    found = []
    for second, on_its_way_s in zip((10, 20, 30), on_their_way_s, strict=True):
        stamps = at_ms(1000 * second)
        rx_ns = (second + on_its_way_s) * NS_PER_S
        found.append(row.reference.append(stamps, ramp(stamps), rx_ns))
    assert found[:2] == [1, int(is_asked)]


# ---- properties ------------------------------------------------------------------------------


SAMPLES = st.lists(
    st.tuples(st.integers(-4, 30), st.sampled_from([1.0, 2.0, -3.0, np.nan, np.inf])),
    max_size=7,  # too few to be taken for a clock that jumped
)


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

    def __init__(self, bank: RingBank, row: int, clock: StampFilter) -> None:
        super().__init__(bank, row, clock)
        self.clock = clock

    def append(self, stamps: Any, values: Any, rx_ns: int) -> int:
        if lost := max(0, len(stamps) - self.bank.capacity):
            self.refuse("overwritten", lost)
            stamps, values = stamps[lost:], values[lost:]
        clock, last_ns = self.clock, stamps.item(-1)
        rises = stamps.item(0) > self.newest_ns and (np.diff(stamps) > 0).all()
        if rises and np.isfinite(values).all() and clock.accepts(last_ns, rx_ns):
            return super().append(stamps, values, rx_ns)
        if last_ns > self.newest_ns and clock.is_stale(last_ns, rx_ns):
            self.refuse("stale", len(stamps))
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
                one = slice(index, index + 1)
                taken += super().append(stamps[one], values[one], rx_ns)
                continue
            self.refuse(reason, 1)
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


@settings(max_examples=200, deadline=None)
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
        clocks = [numbers_of(row.clock, native.Clock) for row in both]
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


class Tap:
    """Keeps what it is told of arrivals."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bytes, bytes, int]] = []

    def samples(self, name: str, stamps: Any, values: Any, rx_ns: int) -> None:
        self.told.append((name, stamps.tobytes(), values.tobytes(), rx_ns))


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from([-40, 0, 1, 33, 33, 250, 5000]),  # ms from the stamp before
            st.sampled_from([0, 33, 33, 400, BACKLOG_NS // MS]),  # ms from the arrival before
        ),
        min_size=1,
        max_size=12,
    ),
    first_ns=st.sampled_from([10**12, -(10**12)]),  # a robot's clock may begin anywhere
    is_tapped=st.booleans(),
)
def test_a_frame_in_its_senders_memory_is_judged_and_kept_as_any_other(
    arrivals: list[tuple[int, int]], first_ns: int, is_tapped: bool
) -> None:
    image = ImageConfig(height=2, width=3)
    camera = msgspec.structs.replace(stream("front"), dim=18, dtype="uint8", image=image)
    banks = [{"front": RingBank(camera, 1, 4)} for _ in range(2)]
    rows = [RowInput(bank, 0, "front") for bank in banks]
    taps = [Tap(), Tap()]
    rings = [row.reference for row in rows]
    for row, tap in zip(rows, taps, strict=True):
        row.open(7)
        row.reference.tap = tap if is_tapped else None  # type: ignore[assignment]
    stamp_ns, rx_ns = first_ns, 10**12
    with Wire() as wire:
        for number, (step_ms, pause_ms) in enumerate(arrivals):
            stamp_ns, rx_ns = stamp_ns + step_ms * MS, rx_ns + pause_ms * MS
            stamp, pixels = stamp_ns.to_bytes(8, "little", signed=True), bytes([number] * 18)
            sent = wire.message(pixels, head=b"head")
            taken = rings[0].append_frame(stamp, sent, 4, rx_ns)
            assert taken == rings[1].append_message(memoryview(stamp), memoryview(pixels), rx_ns)
    states = [state_of(row, bank) for row, bank in zip(rows, banks, strict=True)]
    assert states[0] == states[1]
    assert taps[0].told == taps[1].told
    for ring in rings:
        ring.check()


class Keeper:
    """Keeps all frames but the second."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bytes, int]] = []
        self.is_cleared = False

    def keep(self, number: int, message: LargeMessage, offset: int) -> bool:
        self.asked.append((number, message.head(4), offset))
        return number != 1

    def clear(self) -> None:
        self.is_cleared = True


def test_frames_that_stay_with_their_sender_are_judged_and_not_copied() -> None:
    image = ImageConfig(height=2, width=3)
    camera = msgspec.structs.replace(stream("front"), dim=18, dtype="uint8", image=image)
    bank = RingBank(camera, 1, 2)
    row = RowInput({"front": bank}, 0, "front")
    row.open(7)
    ring, keeper = row.reference, Keeper()
    ring.keeper = keeper
    with Wire() as wire:
        for number, stamp_ms in enumerate((10, 20, 20, 30)):  # the third is no newer
            sent = wire.message(bytes([1 + number] * 18), head=b"head")
            stamp = (10**12 + stamp_ms * MS).to_bytes(8, "little")
            assert ring.append_frame(stamp, sent, 4, 10**12 + stamp_ms * MS) == (number != 2)
    assert keeper.asked == [(number, b"head", 4) for number in range(3)]
    assert bank.values[0, :, 0].tolist() == [0, 2]
    assert (ring.accepted, ring.count, ring.ledger.received) == (3, 2, 4)
    ring.check()
    assert not keeper.is_cleared
    row.new_episode()
    assert keeper.is_cleared


@contextmanager
def unreadable(fd: int) -> Iterator[None]:
    """Meanwhile reading fails, as of a page that was lost."""
    kept, written = os.dup(fd), os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.dup2(written, fd)
    yield
    os.dup2(kept, fd)
    os.close(kept)
    os.close(written)


@pytest.mark.parametrize("frames", [2, 4])
def test_a_frame_that_cannot_be_read_leaves_no_half_of_it_and_counts_balance(frames: int) -> None:
    image = ImageConfig(height=2, width=3)
    camera = msgspec.structs.replace(stream("front"), dim=18, dtype="uint8", image=image)
    row = RowInput({"front": RingBank(camera, 1, 4)}, 0, "front")
    row.open(7)
    ring = row.reference
    with Wire() as wire:
        for number in range(frames + 2):
            sent = wire.message(bytes(18), head=b"head")
            rx_ns = 10**12 + number * 33 * MS
            stamp = rx_ns.to_bytes(8, "little")
            if number != frames:
                assert ring.append_frame(stamp, sent, 4, rx_ns) == 1
                continue
            with unreadable(wire.fd), pytest.raises(ProtocolError):
                ring.append_frame(stamp, sent, 4, rx_ns)
            assert ring.count == 0  # the oldest frame's place may be half written
            ring.check()
    assert (ring.count, ring.ledger.received) == (1, frames + 1)
    ring.check()
