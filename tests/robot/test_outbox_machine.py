from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ppstream.core.clock import ManualClock
from ppstream.core.errors import SpecError
from ppstream.robot.outbox import BATCH_SAMPLES, Batch, Outbox
from ppstream.wire.fields import MAX_PUSH_BYTES

LARGE = (
    MAX_PUSH_BYTES // 4 // 3 - 2
)  # beside its stamp, values of one sample: a full batch holds three
STREAMS: Any = [("joints", 2), ("imu", 1, "float64"), ("grid", LARGE), ("eye", 9, "uint8", "jpeg")]
RAW = {name: (index, dim) for index, (name, dim, *_) in enumerate(STREAMS[:3])}
DTYPES = {"joints": np.float32, "imu": np.float64, "grid": np.float32}
BATCH_NS = 10
MOST = {"joints": MAX_PUSH_BYTES // 16, "imu": MAX_PUSH_BYTES // 16, "grid": 3}  # samples at once
FULL = {name: min(BATCH_SAMPLES, most) for name, most in MOST.items()}

streams = st.sampled_from([*RAW])
spans = st.sampled_from([0, 1, BATCH_NS - 1, BATCH_NS])


class OutboxSendsEverySampleOnceInOrderAndInTime(RuleBasedStateMachine):
    """The model is the samples that wait, by stream: the stamp and when it was pushed.

    A stamp counts the pushed samples, and all values of a sample equal its stamp.
    """

    @initialize(batch_ns=st.sampled_from([0, BATCH_NS]))
    def begin(self, batch_ns: int) -> None:
        self.clock = ManualClock(100)
        self.batch_ns = batch_ns
        self.outbox = Outbox(STREAMS, batch_ns)
        self.waiting: dict[str, list[tuple[int, int]]] = {name: [] for name in RAW}
        self.sent: list[tuple[Batch, bytes]] = []
        self.pushed = 0

    @rule(span=spans)
    def time_passes(self, span: int) -> None:
        self.clock.advance(span)

    @rule(stream=streams, span=spans, is_array=st.booleans())
    def push_one(self, stream: str, span: int, *, is_array: bool) -> None:
        self.clock.advance(span)
        values = np.full(RAW[stream][1], self.pushed, DTYPES[stream])
        is_list = not is_array and len(values) < LARGE
        if not self._push(stream, [self.pushed], values.tolist() if is_list else values):
            values[:] = -1  # what is gathered is a copy

    @rule(
        stream=streams,
        span=spans,
        samples=st.sampled_from([1, 2, 3, BATCH_SAMPLES - 1, BATCH_SAMPLES, BATCH_SAMPLES + 1]),
    )
    def push_several(self, stream: str, span: int, samples: int) -> None:
        self.clock.advance(span)
        stamps = np.arange(self.pushed, self.pushed + min(samples, MOST[stream]))
        self._push(stream, stamps, np.repeat(stamps[:, None], RAW[stream][1], axis=1))

    @rule(stream=streams)
    def push_nothing(self, stream: str) -> None:
        stamps, values = np.empty(0, np.int64), np.empty((0, RAW[stream][1]))
        assert self.outbox.add(stream, stamps, values, self.clock()) == []

    @rule(stream=streams, stamp=st.sampled_from([1.5, 2**63, -(2**63) - 1, np.uint64(2**63), "1"]))
    def push_a_stamp_that_is_none(self, stream: str, stamp: Any) -> None:
        with pytest.raises(SpecError):
            self.outbox.add(stream, stamp, np.zeros(RAW[stream][1], DTYPES[stream]), self.clock())

    @rule(
        stream=streams,
        shape=st.sampled_from([(), (4,), (2, 1), (1, 1, 2), (0,)]),
        stamps=st.sampled_from([1, np.arange(3), np.zeros((1, 1), np.int64)]),
    )
    def push_another_shape(self, stream: str, shape: tuple[int, ...], stamps: Any) -> None:
        values = np.zeros(shape, DTYPES[stream])
        if stream == "imu" and values.size == 1 and isinstance(stamps, int):
            return  # one value is one sample of it
        with pytest.raises(SpecError):
            self.outbox.add(stream, stamps, values, self.clock())

    @rule(values=st.sampled_from([np.zeros(9, np.uint8), np.array(0, np.uint8), [0] * 9]))
    def push_raw_what_is_sent_encoded(self, values: Any) -> None:
        with pytest.raises(SpecError):
            self.outbox.add("eye", 1, values, self.clock())

    @rule(
        stream=st.sampled_from(["eye", "joints", "nose"]),
        size=st.sampled_from([0, 1, 9, MAX_PUSH_BYTES, MAX_PUSH_BYTES + 1]),
        stamp=st.sampled_from([-(2**63), 7, 2**63 - 1, 2**63]),
    )
    def push_a_frame(self, stream: str, size: int, stamp: int) -> None:
        data = b"j" * size
        if stream != "eye" or not 1 <= size <= MAX_PUSH_BYTES or stamp == 2**63:
            with pytest.raises(SpecError):
                self.outbox.encoded(stream, stamp, data)
            return
        batch = self.outbox.encoded(stream, stamp, data)
        assert (batch.stream, batch.samples, bytes(batch.values)) == (3, 1, data)
        assert np.frombuffer(batch.stamps, np.int64).tolist() == [stamp]

    @rule()
    def pop_due(self) -> None:
        self._left(self.outbox.pop_due(self.clock()))
        self._nothing_is_late()

    @rule()
    def take_everything(self) -> None:
        self._left(self.outbox.pop_due(self.clock(), everything=True))
        assert not any(self.waiting.values())

    @invariant()
    def due_is_when_the_oldest_must_leave(self) -> None:
        oldest = min((one[0][1] for one in self.waiting.values() if one), default=None)
        assert self.outbox.due_ns == (None if oldest is None else oldest + self.batch_ns)

    @invariant()
    def what_waits_fits_one_batch(self) -> None:
        for name, waiting in self.waiting.items():
            assert len(waiting) <= FULL[name]

    @invariant()
    def what_left_stays_as_it_was(self) -> None:
        assert all(bytes(batch.values) == values for batch, values in self.sent)
        self.sent = self.sent[-2:]

    def _push(self, stream: str, stamps: Any, values: Any) -> bool:
        """Whether something left: what was due, or what does not fit one batch; else nothing."""
        now, waits = self.clock(), len(self.waiting[stream])
        due_ns = self.outbox.due_ns
        self.pushed += len(stamps)
        self.waiting[stream] += [(int(stamp), now) for stamp in stamps]
        stamp = stamps[0] if len(stamps) == 1 and np.ndim(values) == 1 else stamps
        batches = self.outbox.add(stream, stamp, values, now)
        self._left(batches)
        is_due = not self.batch_ns or (due_ns is not None and due_ns <= now)
        assert bool(batches) == (is_due or waits + len(stamps) > FULL[stream])
        self._nothing_is_late()
        return bool(batches)

    def _left(self, batches: list[Batch]) -> None:
        names = [*RAW]
        for batch in batches:
            name = names[batch.stream]
            left, self.waiting[name] = (
                self.waiting[name][: batch.samples],
                self.waiting[name][batch.samples :],
            )
            stamps = np.frombuffer(batch.stamps, np.int64)
            values = np.frombuffer(batch.values, DTYPES[name]).reshape(len(stamps), RAW[name][1])
            assert len(stamps) == batch.samples > 0
            assert stamps.tolist() == [stamp for stamp, _ in left]
            assert (values == stamps[:, None]).all()
            if self.batch_ns and len(batch.values) < BATCH_SAMPLES:
                self.sent.append((batch, bytes(batch.values)))

    def _nothing_is_late(self) -> None:
        waiting = [pushed_ns for one in self.waiting.values() for _, pushed_ns in one]
        assert all(self.clock() < pushed_ns + self.batch_ns for pushed_ns in waiting)


TestOutboxSendsEverySampleOnceInOrderAndInTime = OutboxSendsEverySampleOnceInOrderAndInTime.TestCase
TestOutboxSendsEverySampleOnceInOrderAndInTime.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
