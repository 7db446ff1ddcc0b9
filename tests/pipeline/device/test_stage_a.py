"""Whose rows a complete window had is known per row, and read once for all windows of a table."""

from __future__ import annotations

from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeDriver
from pipeline_in_process import small_config

from ppstream.cuda import driver
from ppstream.cuda.driver import CudaStream
from ppstream.ingest.device.window_records import TakenWindow
from ppstream.ingest.intake import build_intake
from ppstream.ingest.window import WindowInfo
from ppstream.links.device_link import Headers, device_slots
from ppstream.links.headers import ENVELOPE_HEADER
from ppstream.links.slots import SlotLayout, new_slots
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.device import stage_a
from ppstream.pipeline.device.stage_a import DeviceFrontParts, QueuedWindows, RingWindows
from ppstream.pipeline.flight import Flight, Owner
from ppstream.policy.batch_sizes import BatchSizes

LEASE = 60_000_000_000
LATER_NS = 600_000_000  # by then the first samples of a stream are too old


class Windows:
    """Complete ones, one after the other; keeps for how many rows each was queued.

    Each ingest sends a table, ``sent_whole`` says whether it told of all; a window goes by the one
    that was the newest when it was queued.
    """

    sent_whole = True

    def __init__(self, *taken: TakenWindow, is_limited: bool = False) -> None:
        self._taken = list(taken)
        self.is_limited = is_limited
        self.queued: list[int | None] = []
        self.rings = SimpleNamespace(sequence=0)
        self._tables: list[int] = []
        self.table = -1

    @property
    def is_idle(self) -> bool:
        return not self._tables

    def ingest(self, now_ns: int, ends_ns: Any = None) -> bool:
        self.rings.sequence += 1
        return self.sent_whole

    rehearse = partialmethod(ingest, 0)

    def prepare(self, tensors: Any) -> None:
        """Nothing is recorded."""

    def enqueue(self, tensors: Any, stream: Any, launch: Any, rows: int | None) -> None:
        self.queued.append(rows)
        self._tables.append(self.rings.sequence)

    def pop(self) -> TakenWindow:
        if self._tables:
            self.table = self._tables.pop(0)
        return self._taken.pop(0)


def taken(end: int, received: tuple[int, int]) -> TakenWindow:
    info = WindowInfo([end, 0], max(received), {"joints": [3, None]})
    return TakenWindow(info, [True, False], [(7, 1), (0, 0)], list(received))


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch) -> Any:
    def settle(*windows: TakenWindow) -> list[Flight]:
        config = small_config("batch.rows=2")
        stage: Any = RingWindows(config, (), torch.device("cpu"), None)  # type: ignore[arg-type]
        monkeypatch.setattr(stage_a, "DeviceWindow", lambda *_, **more: Windows(*windows, **more))
        stage.intake = SimpleNamespace(rows=(), banks={})
        flights = [Flight(n, 0, n, EnvelopeRecord()) for n in range(len(windows))]
        for flight in flights:
            stage.settle(flight)
        return flights

    return settle


def test_a_row_has_the_arrival_of_its_own_newest_sample(settle: Any) -> None:
    (flight,) = settle(taken(100, (50, 80)))
    assert flight.owners == [
        Owner(True, (7, 1), 100, 100 + LEASE, 50),
        Owner(False, (0, 0), 0, LEASE, 80),
    ]
    assert flight.received_ns == flight.record.tRx == 80
    assert flight.record.input_age_ns == {"joints": [3, None]}
    record = flight.record
    assert (record.session, record.session_epoch) == ([7, 0], [1, 0])
    assert (record.window_end_ns, record.expires_ns) == ([100, 0], [100 + LEASE, LEASE])


def test_windows_of_one_table_share_what_is_known_and_others_do_not(settle: Any) -> None:
    same, other = taken(100, (50, 80)), taken(120, (60, 80))
    first, second, third = settle(same, same, other)
    assert first.owners is second.owners
    assert second.record.window_end_ns == [100, 0]
    assert third.owners[0] == Owner(True, (7, 1), 120, 120 + LEASE, 60)
    assert third.record.window_end_ns == [120, 0]


class Recorded:
    """Tells marks of how many calls came so far; keeps what windows were told of."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int]]] = []
        self.marked = 0

    def marks(self) -> list[int]:
        self.marked += 1
        return [self.marked]

    def windows(
        self, at_ns: int, epoch: int, seq: int, phase: str, owners: Any, marks: Any
    ) -> None:
        assert (at_ns, owners[0].window_end_ns) == (1000 + seq, 100)
        self.told.append((seq, marks))


def test_a_recorder_is_told_what_had_come_by_the_table_of_each_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = Windows(*[taken(100, (50, 80))] * 5)
    monkeypatch.setattr(stage_a, "DeviceWindow", lambda *_, **more: windows)
    stage: Any = RingWindows(small_config("batch.rows=2"), (), torch.device("cpu"), None)  # type: ignore[arg-type]
    stage.intake = SimpleNamespace(rows=(), banks={})
    stage.recorder = recorder = Recorded()
    slot: Any = SimpleNamespace(tensors={})

    def enqueue(*numbers: int) -> None:
        for number in numbers:
            stage.enqueue(flights[number], slot, (None, None))

    flights = [Flight(n, 0, n, EnvelopeRecord()) for n in range(5)]
    for flight in flights:
        flight.record.tA0 = 1000 + flight.seq
    for _ in range(3):
        stage.ingest(0)
    enqueue(0, 1)
    stage.rehearse()
    stage.ingest(0)
    enqueue(2)
    windows.sent_whole = False  # a table that tells of a part of what has come
    stage.ingest(0)
    enqueue(3)
    windows.sent_whole = True
    stage.ingest(0)
    enqueue(4)
    for flight in flights:
        stage.settle(flight)
    assert recorder.told == [(0, [3]), (1, [3]), (2, [5]), (4, [6])]


class Event:
    """In place of torch's: in a list of what happened; ``took_ms`` from one to the next."""

    happened: list[str]
    took_ms: float

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        self.happened.append("record")

    def synchronize(self) -> None:
        self.happened.append("wait")

    def elapsed_time(self, end: Event) -> float:
        assert self.happened[-1] == "wait"
        return self.took_ms


@pytest.mark.parametrize("took_ms", [0.0, 40.0])
def test_a_window_that_is_queued_ends_when_the_gpu_has_cut_it(
    monkeypatch: pytest.MonkeyPatch, took_ms: float
) -> None:
    happened: list[str] = []
    Event.happened, Event.took_ms = happened, took_ms
    windows = Windows(taken(100, (50, 80)))
    enqueue, pop = windows.enqueue, windows.pop
    windows.enqueue = lambda *args: (happened.append("window"), enqueue(*args))[-1]  # type: ignore[method-assign]
    windows.pop = lambda: (happened.append("read"), pop())[-1]  # type: ignore[method-assign]
    monkeypatch.setattr(stage_a, "DeviceWindow", lambda *_, **more: windows)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    config = small_config("batch.rows=2")
    intake = build_intake(config)
    device_slot: Any = SimpleNamespace(tensors={})
    stage = QueuedWindows(config, device_slot, torch.device("cpu"), None)  # type: ignore[arg-type]
    stage.intake = SimpleNamespace(rows=intake.rows, banks={})  # type: ignore[assignment]
    come(intake.rows[1], 5)
    (slot,) = new_slots(SlotLayout(ENVELOPE_HEADER, intake.cutter.inputs, 2), 1)
    flight = Flight(0, 0, 0, EnvelopeRecord())
    stage.build(flight, slot, (None, None))
    assert happened == ["record", "window", "record"]  # the policy can be queued behind it
    assert slot.arrays["present"].tolist() == [False, True]
    assert slot.arrays["rows"][:, 0].tolist() == [0, 5]
    begun_ns, queued_ns = flight.record.tA0 or 0, flight.record.tA1 or 0
    stage.settle(flight)
    assert happened[3:] == ["wait", "read"]
    took_ns = (flight.record.tA1 or 0) - begun_ns
    if took_ms:
        assert took_ms * 1e6 <= took_ns < took_ms * 1e6 + queued_ns - begun_ns
    else:
        assert took_ns == queued_ns - begun_ns
    assert flight.owners[0].window_end_ns == 100


def test_a_window_that_is_queued_has_the_robots_that_are_there_where_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_a, "DeviceWindow", lambda *_, **more: Windows())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.happened = []
    config = small_config()
    intake = build_intake(config, {"state": True})
    device_slot: Any = SimpleNamespace(tensors={})
    stage = QueuedWindows(config, device_slot, torch.device("cpu"), None)  # type: ignore[arg-type]
    stage.intake = SimpleNamespace(rows=intake.rows, banks={})  # type: ignore[assignment]
    come(intake.rows[0], 5)
    (slot,) = new_slots(SlotLayout(ENVELOPE_HEADER, intake.cutter.inputs, 1), 1)
    for end_ns, present in ((1, True), (LATER_NS, False)):
        stage.build(Flight(0, 0, 0, EnvelopeRecord()), slot, (end_ns,))
        assert slot.arrays["present"].tolist() == [present]


ROWS = 4


class Front:
    """Keeps with how many rows it is called; in place of a ``DeviceStageB``."""

    def __init__(self) -> None:
        self.given: list[int | None] = []

    def __call__(self, envelope: Any, result: Any, rows: int | None = None) -> None:
        self.given.append(rows)


@pytest.fixture
def in_front(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes stage A with front parts of these sizes; returns it, the parts' calls, the windows."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "driver", lambda: fake)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: None)
    made: list[Windows] = []
    kept: list[Any] = []  # what streams copy to and from, while they do

    def window(*_: Any, **more: Any) -> Windows:
        made.append(Windows(**more))
        return made[-1]

    def make(sizes: BatchSizes | None, **blind: bool) -> tuple[Any, Front, list[Windows], Any]:
        config = small_config(f"batch.rows={ROWS}")
        intake = build_intake(config, blind)
        layout = SlotLayout(ENVELOPE_HEADER, intake.cutter.inputs, ROWS)
        memory = torch.zeros(3 * layout.slot_bytes, dtype=torch.uint8)
        own, *slots = device_slots(memory, layout, 3)
        stage: Any = Front()
        headers = Headers(layout, len(slots), 0)
        front = DeviceFrontParts(stage, own, headers, None, 0, {}, CudaStream(), sizes)
        front.prepare(slots)
        ring_windows: Any = RingWindows(config, slots, torch.device("cpu"), None, front)  # type: ignore[arg-type]
        ring_windows.intake = intake
        kept.append(ring_windows)
        return ring_windows, stage, made, slots[0]

    monkeypatch.setattr(stage_a, "DeviceWindow", window)
    yield make
    fake.close()


def come(row: Any, session: int) -> None:
    """A robot takes the row, and its first samples arrive."""
    row.open(session)
    for ring in row.rings.values():
        ring.append(np.array([1]), np.zeros((1, ring.stream.dim), np.float32), 1)


def test_a_window_and_the_parts_behind_it_have_rows_for_the_robots_that_are_there(
    in_front: Any,
) -> None:
    stage, parts, (window,), slot = in_front(BatchSizes((1, 2, 4)))
    assert parts.given == [None, 1, 2] * 2 * 2  # each size on each slot, twice, while warming
    parts.given.clear()
    rows, flight = stage.intake.rows, Flight(0, 0, 0, EnvelopeRecord())
    newest = (None,) * ROWS
    for act in (
        lambda: come(rows[0], 1),
        lambda: rows[1].open(2),  # not there before it has sent something
        lambda: rows[1].close(),
        lambda: come(rows[1], 3),
        lambda: come(rows[3], 4),
        lambda: rows[3].close(),
        lambda: rows[1].new_episode(),
    ):
        act()
        stage.enqueue(flight, slot, newest)
    assert parts.given == [1, 1, 1, 2, None, 2, 1]
    assert window.queued == parts.given  # so nobody is in a window whom they do not compute
    assert window.is_limited


@pytest.mark.parametrize(("end_ns", "rows"), [(1, 2), (LATER_NS, 1)])
def test_rows_are_for_the_robots_that_are_there_where_the_window_ends(
    in_front: Any, end_ns: int, rows: int
) -> None:
    stage, parts, _, slot = in_front(BatchSizes((1, 2, 4)), state=True)
    parts.given.clear()
    first, second, *_ = stage.intake.rows
    come(first, 1)
    come(second, 2)
    imu = first.rings["imu"]
    imu.append(np.array([LATER_NS]), np.zeros((1, imu.stream.dim), np.float32), LATER_NS)
    stage.enqueue(Flight(0, 0, 0, EnvelopeRecord()), slot, (end_ns,) * ROWS)
    assert parts.given == [rows]


def test_parts_of_one_size_leave_their_windows_to_whoever_comes(in_front: Any) -> None:
    stage, parts, (window,), slot = in_front(None)
    come(stage.intake.rows[0], 1)
    stage.enqueue(Flight(0, 0, 0, EnvelopeRecord()), slot, (None,) * ROWS)
    assert set(parts.given) == {None}
    assert window.queued == [None]
    assert not window.is_limited
