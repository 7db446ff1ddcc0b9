"""Two rows beside each other, one served by the core and one by Python: equal in every number."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import MS, stream
from twin_rows import in_python, state_of

from ppstream import native
from ppstream.ingest.ring import RingBank, SensorRing
from ppstream.ingest.rows import RowInput
from ppstream.ingest.stamp_filter import (
    BACKLOG_NS,
    BEST_NS,
    FUTURE_LIMIT_NS,
    JUMP_SAMPLES,
    StampFilter,
)

REFERENCE, OTHER = "joints", "force"
DIM = 2
STALE_NS = 300 * MS
FAR = 1 << 62


class Twins:
    """The same row twice: rings of two streams and their clock."""

    def __init__(self, capacity: int) -> None:
        streams = [stream(REFERENCE, DIM, max_gap_ms=5.0), stream(OTHER, DIM, max_gap_ms=1e6)]
        self.banks: list[dict[str, RingBank]] = []
        self.rows = []
        for made in (nullcontext(), in_python()):
            banks = {one.name: RingBank(one, 2, capacity) for one in streams}
            with made:
                row = RowInput(banks, 1, REFERENCE, STALE_NS)
            row.open(1)
            self.banks.append(banks)
            self.rows.append(row)

    def both(self, call: Any) -> Any:
        """What ``call`` says of a row, the same of both; then all that they hold is the same."""
        found = [call(row) for row in self.rows]
        assert found[0] == found[1]
        states = [state_of(*pair) for pair in zip(self.rows, self.banks, strict=True)]
        assert states[0] == states[1]
        return found[0]


class Message(NamedTuple):
    name: str
    late_ns: int  # since the message before
    begin_ns: int  # the first stamp, beside the newest
    steps_ns: list[int]  # from stamp to stamp
    values: list[float]
    kind: str


usual_steps = st.lists(st.integers(1, 4 * MS), max_size=9)
odd_steps = st.lists(st.integers(-2 * MS, 9 * MS) | st.sampled_from([0, FAR, -FAR]), max_size=9)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.just(-0.0)
messages = st.builds(
    Message,
    name=st.sampled_from([REFERENCE, REFERENCE, OTHER]),
    late_ns=st.integers(0, 9 * MS)
    | st.sampled_from([STALE_NS, BACKLOG_NS + 1, BEST_NS, FUTURE_LIMIT_NS]),
    begin_ns=st.integers(1, 6 * MS) | st.sampled_from([0, -1, STALE_NS, -FAR, FAR]),
    steps_ns=usual_steps | odd_steps,
    values=st.lists(numbers, min_size=1, max_size=20)
    | st.lists(numbers | st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=20),
    kind=st.sampled_from(["plain", "bytes"])
    | st.sampled_from(["unaligned", "strided", "float64", "wide", "many"]),
)
windows = st.tuples(st.sampled_from([REFERENCE, OTHER]), st.integers(-9, 9), st.integers(0, 30))
others = st.sampled_from(["episode", "close", "recording", "jump"])


def arrays(message: Message, begin_ns: int) -> tuple[Any, Any]:
    steps = message.steps_ns * (9 if message.kind == "many" else 1)
    stamps = (np.cumsum([0, *steps], dtype=np.int64) + np.int64(begin_ns)).astype(np.int64)
    columns = DIM + (message.kind == "wide")
    filled = np.resize(np.array(message.values, np.float32), (len(stamps), columns))
    if message.kind == "float64":
        return stamps, filled.astype(np.float64)
    if message.kind == "strided":
        return np.repeat(stamps, 2)[::2], np.repeat(filled, 2, axis=0)[::2]
    if message.kind == "unaligned":
        shifted = (b"\0" + stamps.tobytes(), b"\0" + filled.tobytes())
        read = np.frombuffer(shifted[0], np.int64, offset=1)
        return read, np.frombuffer(shifted[1], np.float32, offset=1).reshape(filled.shape)
    return stamps, filled


def in_bytes(ring: SensorRing, stamps: Any, values: Any, rx_ns: int) -> int:
    return ring.append_message(as_bytes(stamps), as_bytes(values), rx_ns)


def as_bytes(array: Any) -> memoryview:
    return memoryview(b"\0" + array.tobytes())[1:]  # unaligned, as in a message


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([1, 2, 5, 8, 64]),
    st.lists(messages | messages | messages | windows | others, max_size=40),
)
def test_whatever_arrives_both_rows_hold_and_count_the_same(
    capacity: int, events: list[Any]
) -> None:
    twins = Twins(capacity)
    rx_ns = 100 * BEST_NS
    with np.errstate(over="ignore"):
        for event in events:
            if isinstance(event, Message):
                rx_ns += event.late_ns
                newest_ns = twins.rows[0].rings[event.name].newest_ns
                begin_ns = (rx_ns if newest_ns == -FAR else newest_ns) + event.begin_ns
                sent = arrays(event, begin_ns)
                if event.kind == "bytes":
                    twins.both(lambda row: in_bytes(row.rings[event.name], *sent, rx_ns))  # noqa: B023
                else:
                    twins.both(lambda row: row.rings[event.name].append(*sent, rx_ns))  # noqa: B023
            elif isinstance(event, tuple):
                name, behind_ms, span_ms = event
                newest_ns = twins.rows[0].rings[REFERENCE].newest_ns
                end_ns = (rx_ns if newest_ns == -FAR else newest_ns) - behind_ms * MS
                limits = end_ns - span_ms * MS, end_ns
                twins.both(lambda row: row.rings[name].settle(*limits))  # noqa: B023
            elif event == "episode":
                twins.both(lambda row: row.new_episode())
            elif event == "jump":
                stamps = np.full(JUMP_SAMPLES + 1, -7, np.int64)
                zeros = np.zeros((len(stamps), DIM), np.float32)
                twins.both(lambda row: row.rings[OTHER].append(stamps, zeros, rx_ns))  # noqa: B023
            else:
                twins.both(lambda row: row.close())
                twins.both(lambda row: row.open(1, is_real_time=event == "close"))  # noqa: B023


def usual(count: int, after_ms: int = 0) -> tuple[Any, Any]:
    stamps = (np.arange(count, dtype=np.int64) + after_ms) * MS
    return stamps, np.ones((count, DIM), np.float32)


def open_row(capacity: int = 8) -> RowInput:
    row = Twins(capacity).rows[0]
    assert row.reference.append(*usual(1), 0) == 1
    return row


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_core_takes_a_usual_message_itself(count: int) -> None:
    row = open_row()
    ring = row.reference
    assert ring.try_append(*usual(count, after_ms=1), count * MS, ring.ledger, row.clock) == count
    assert (ring.count, ring.accepted, ring.ledger.in_flight) == (count + 1,) * 3


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_core_takes_the_bytes_of_a_usual_message_itself(count: int) -> None:
    row = open_row()
    ring = row.reference
    sent = [as_bytes(array) for array in usual(count, after_ms=1)]
    assert ring.try_append(*sent, count * MS, ring.ledger, row.clock) == count
    assert (ring.count, ring.accepted, ring.ledger.in_flight) == (count + 1,) * 3


UNUSUAL = {
    "bytes of half a stamp": lambda: (as_bytes(usual(1, 1)[0])[:4], as_bytes(usual(1)[1])),
    "more bytes than stamps": lambda: (
        memoryview(as_bytes(usual(1, 1)[0]).tobytes() + b"\0"),
        as_bytes(usual(1)[1]),
    ),
    "bytes of more values": lambda: (as_bytes(usual(1, 1)[0]), as_bytes(usual(2)[1])),
    "bytes as rows": lambda: (
        usual(1, 1)[0],
        as_bytes(usual(1)[1]).cast("B", (DIM * 4, 1)),
    ),
    "nothing": lambda: usual(0),
    "more than fits": lambda: usual(9, after_ms=1),
    "a stamp again": lambda: usual(1),
    "a hole": lambda: usual(1, after_ms=7),
    "not a number": lambda: (usual(2, after_ms=1)[0], np.float32([[1, 1], [1, np.nan]])),
    "another dtype": lambda: (usual(1, after_ms=1)[0], np.ones((1, DIM))),
    "another byte order": lambda: (usual(1, after_ms=1)[0].astype(">i8"), usual(1)[1]),
    "another width": lambda: (usual(1, after_ms=1)[0], np.ones((1, DIM + 1), np.float32)),
    "another length": lambda: (usual(2, after_ms=1)[0], np.ones((1, DIM), np.float32)),
    "holes in memory": lambda: (usual(4, after_ms=1)[0][::2], usual(2)[1]),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_the_core_leaves_the_unusual_alone_and_touches_nothing(what: str) -> None:
    row = open_row()
    ring = row.reference
    before = state_of(row, {REFERENCE: ring.bank})
    stamps, values = UNUSUAL[what]()
    assert ring.try_append(stamps, values, 9 * MS, ring.ledger, row.clock) == 0
    assert state_of(row, {REFERENCE: ring.bank}) == before


#: Messages of one sample each: by how much it comes later than the one before, and is newer.
AT_A_LIMIT = {
    "a step just no hole": [(5 * MS, 5 * MS)],
    "a step that is a hole": [(5 * MS + 1, 5 * MS + 1)],
    "as late as may be": [(STALE_NS + 1, 1)],
    "later than that": [(STALE_NS + 2, 1), (0, STALE_NS), (STALE_NS + 9, 1), (BACKLOG_NS - 9, 1)],
    "one after the other late": [(STALE_NS + 2, 1), (0, STALE_NS), (BACKLOG_NS, 1), (9, 1)],
    "as quick as the quickest": [(MS, MS), (MS, MS)],
    "quicker": [(MS, MS + 1), (MS, MS)],
    "good after one that was late": [(1, -1), (1, 2)],
    "good after a backlog": [(STALE_NS + 2, 1), (0, STALE_NS), (BACKLOG_NS, 1), (0, BACKLOG_NS)],
    "the best of late is old": [(BEST_NS - 1, BEST_NS - 1), (1, 1), (1, 0)],
}


@pytest.mark.parametrize("name", [REFERENCE, OTHER])
@pytest.mark.parametrize("what", AT_A_LIMIT)
def test_at_each_limit_both_decide_the_same(what: str, name: str) -> None:
    twins = Twins(8)
    rx_ns = stamp_ns = 100 * BEST_NS
    for late_ns, newer_ns in [(0, 0), *AT_A_LIMIT[what]]:
        rx_ns, stamp_ns = rx_ns + late_ns, stamp_ns + newer_ns
        stamps, values = np.array([stamp_ns]), np.ones((1, DIM), np.float32)
        twins.both(lambda row: row.rings[name].append(stamps, values, rx_ns))  # noqa: B023


def test_the_core_takes_what_the_clock_learns_from_and_what_overwrites() -> None:
    row = open_row()
    ring = row.reference
    assert ring.try_append(*usual(8, after_ms=1), 0, ring.ledger, row.clock) == 8
    assert ring.ledger.dropped == {"overwritten": 1}
    ring.check()
    learned_ns = 8 * MS - STALE_NS  # the lead of the newest counts from now on
    assert [row.clock.is_stale(learned_ns - late_ns, 0) for late_ns in (0, 1)] == [False, True]


def test_the_first_of_a_clock_may_be_as_old_as_it_likes() -> None:
    twins = Twins(8)
    for stamp_ns in (1 - FAR, 2 - FAR):
        stamps, values = np.array([stamp_ns]), np.ones((1, DIM), np.float32)
        twins.both(lambda row: row.reference.append(stamps, values, 5))  # noqa: B023


@pytest.mark.parametrize(("name", "number"), [("count", 9), ("settled", 3), ("accepted", -1)])
def test_numbers_that_contradict_each_other_reach_no_memory(name: str, number: int) -> None:
    row = open_row()
    ring = row.reference
    setattr(ring, name, number)
    assert ring.try_append(*usual(1, after_ms=1), MS, ring.ledger, row.clock) == 0
    with pytest.raises(ValueError, match="numbers disagree"):
        ring.settle(0, MS)


stamps, values, one = np.zeros(4, np.int64), np.zeros((4, DIM), np.float32), np.zeros(1, np.int64)
NO_MEMORY = {
    "too short": (5, values, stamps, one, one),
    "another dtype": (4, values.astype(np.float64), stamps, one, one),
    "no head": (4, values, stamps, one, one[:0]),
    "stamps with holes": (2, values[:2], stamps[::2], one, one),
    "values with holes": (2, values[::2], stamps[:2], one, one),
}


@pytest.mark.parametrize("what", NO_MEMORY)
def test_a_ring_without_memory_that_fits_takes_nothing(what: str) -> None:
    capacity, *memory = NO_MEMORY[what]
    ring, ledger, clock = native.Ring(), native.Ledger(), StampFilter(lambda: None)
    with pytest.raises(ValueError, match="needs"):
        ring.bind(capacity, DIM, *memory, 0)
    ring.newest_ns = -FAR
    assert clock.accepts(9 * MS, 0)
    assert ring.try_append(*usual(1, after_ms=1), 0, ledger, clock) == 0
    with pytest.raises(ValueError, match="numbers disagree"):
        ring.account(0, 0, ledger)


def test_a_ring_is_bound_once() -> None:
    ring = native.Ring()
    ring.bind(4, DIM, values, stamps, one, one, 0)
    with pytest.raises(ValueError, match="bound once"):
        ring.bind(4, DIM, values, stamps, one, one, 0)


def test_every_member_of_the_core_is_one_that_python_names() -> None:
    row = open_row()
    for kind, twin in ((native.Ring, row.reference), (native.Ledger, row.reference.ledger)):
        members = [name for name, one in vars(kind).items() if inspect.ismemberdescriptor(one)]
        assert len(members) >= 3
        assert not set(members) & set(vars(twin))  # else there would be two of it
