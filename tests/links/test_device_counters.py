"""Counted links over a driver of threads: content, order, counters that wrap, releases, notes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_cuda import CYCLE, FakeDriver, queue_call
from fake_put import FakePuts
from fake_wait import FakeWaits
from linked_ends import driven_by, linked
from robot_rig import wait_until

from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import PeerLostError, ProtocolError
from ppstream.core.specs import TensorSpec
from ppstream.cuda.driver import CudaEvent, CudaStream
from ppstream.links import device_counters, latency_probe
from ppstream.links.device_counters import CountedLink
from ppstream.links.slots import BACK, FRONT, LinkShape, Position, SlotLayout

HEADER = ("index", "generation", "epoch", "seq")
GENERATION = 7
MESSAGES = 40
LIMIT_S = 10


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with driven_by(FakeDriver(), monkeypatch) as fake:
        yield fake


def ends(*, puts: bool, spins: bool = False) -> tuple[CountedLink, CountedLink]:
    layout = SlotLayout(HEADER, (TensorSpec("x", (5, 13), "uint8"),), 3)
    shape = LinkShape(layout, layout, 2, 2, GENERATION)
    return linked(
        shape, make_puts=FakePuts if puts else None, make_waits=FakeWaits if spins else None
    )


def stands(stream: CudaStream) -> bool:
    return stream.handle.stands


def assert_the_first_arrives(front: CountedLink, back: CountedLink) -> None:
    front.queue_header(0, (1, 2))
    front.queue_send(0)
    back.queue_receive(0)
    done = CudaEvent()
    back.receiving.record(done)
    wait_until(done.is_done)
    assert back.into[0].header.tolist() == [0, GENERATION, 1, 2]


def set_counts(front: CountedLink, back: CountedLink, count: int) -> None:
    """As if so many had been sent each way."""
    for end in (front, back):
        end.count_from(count)
        wait_until(end.sending.is_idle)


@contextmanager
def echoing(back: CountedLink, messages: int, seen: list[list[int]]) -> Iterator[None]:
    """The other end, on a thread: sends back what it gets, plus one."""
    stage, events = CudaStream(), [CudaEvent() for _ in range(messages)]

    def answer(place: int) -> None:
        seen.append(back.into[place].header.tolist())
        back.out[place].tensors["x"].copy_(back.into[place].tensors["x"] + 1)

    def run() -> None:
        for index in range(messages):
            back.queue_receive(index, stage)
            place = index % len(back.into)
            queue_call(stage, lambda place=place: answer(place))
            back.queue_header(index, (9, index))
            if not back.is_short:
                stage.record(events[index])
                back.sending.wait_for(events[index])
            back.queue_send(index, stage if back.is_short else None)
            stage.record(events[index])
            if index >= 3:
                events[index - 3].wait()
        events[-1].wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("count", [0, (1 << 31) - 13, (1 << 32) - 13])
@pytest.mark.parametrize("spins", [False, True], ids=["driver", "spins"])
@pytest.mark.parametrize("puts", [False, True], ids=["copies", "puts"])
def test_every_message_arrives_whole_and_in_order(
    driver: FakeDriver, puts: bool, spins: bool, count: int
) -> None:
    front, back = ends(puts=puts, spins=spins)
    set_counts(front, back, count)
    seen: list[list[int]] = []
    with echoing(back, MESSAGES, seen):
        for index in range(MESSAGES):
            place = index % len(front.out)
            front.out[place].tensors["x"].fill_(index)
            front.queue_header(index, (5, index))
            front.queue_send(index)
            front.queue_receive(index)
            done = CudaEvent()
            front.receiving.record(done)
            wait_until(done.is_done)
            assert front.into[place].header.tolist() == [index, GENERATION, 9, index]
            assert (front.into[place].tensors["x"] == index + 1).all()
    assert seen == [[index, GENERATION, 5, index] for index in range(MESSAGES)]


@pytest.mark.parametrize("count", [0, 1 << 30, (1 << 31) - 1, (1 << 31) + 5, (1 << 32) - 1])
@pytest.mark.parametrize("spins", [False, True], ids=["driver", "spins"])
def test_a_wait_ends_with_close_whatever_the_count(
    driver: FakeDriver, spins: bool, count: int
) -> None:
    front, back = ends(puts=False, spins=spins)
    set_counts(front, back, count)
    own, event = CudaStream(), CudaEvent()
    front.queue_receive(0)
    front.queue_receive(1, own)
    own.record(event)
    wait_until(lambda: stands(own) and stands(front.receiving))
    assert not event.is_done()
    assert front.close()
    assert event.is_done()


def test_close_waits_for_streams_of_stages_that_the_link_used(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_counters, "RELEASE_LIMIT_NS", 20_000_000)
    front, _ = ends(puts=False)
    own, stage_ends = CudaStream(), threading.Event()
    queue_call(own, lambda: stage_ends.wait(LIMIT_S))  # a stage that does not come to its wait
    front.queue_receive(0, own)
    assert not front.close()
    stage_ends.set()


@pytest.mark.parametrize("spins", [False, True], ids=["driver", "spins"])
def test_a_further_stream_waits_for_its_own_slot_alone(driver: FakeDriver, spins: bool) -> None:
    front, back = ends(puts=True, spins=spins)
    further = [CudaStream() for _ in range(3)]
    passed = [CudaEvent() for _ in further]
    for index in range(3):
        back.queue_receive(index)
    for index, (own, event) in enumerate(zip(further, passed, strict=True)):
        assert back.queue_wait(index, own)
        own.record(event)
    for index, event in enumerate(passed):
        wait_until(lambda index=index: all(map(stands, further[index:])))
        assert not any(later.is_done() for later in passed[index:])
        front.queue_send(index)
        wait_until(event.is_done)


def test_streams_of_stages_look_and_that_of_the_link_never_does(driver: FakeDriver) -> None:
    """Beside the link's own stream a stage may be running, which a kernel would slow down."""
    _, back = ends(puts=True, spins=True)
    back.queue_receive(0)
    assert not driver.spinning
    back.queue_wait(0, CudaStream())
    back.queue_receive(1, CudaStream())
    assert len(driver.spinning) == 2
    assert back.close()


def test_a_send_by_kernel_takes_its_header_along_without_a_copy(driver: FakeDriver) -> None:
    front, back = ends(puts=True)
    assert_the_first_arrives(front, back)
    assert front.out[0].header.tolist() == [0, 0, 0, 0]


def test_an_index_out_of_turn_is_refused(driver: FakeDriver) -> None:
    front, _ = ends(puts=True)
    with pytest.raises(ProtocolError, match="1 was to be sent, 0 is due"):
        front.queue_send(1)
    with pytest.raises(ProtocolError, match="3 was to be received, 0 is due"):
        front.queue_receive(3)


@pytest.mark.parametrize("puts", [False, True], ids=["copies", "puts"])
def test_latency_is_half_a_round_trip_and_costs_no_index(driver: FakeDriver, puts: bool) -> None:
    front, back = ends(puts=puts)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(latency_probe.measure(back, BACK, LIMIT_S)), daemon=True
    )
    thread.start()
    latency = latency_probe.measure(front, FRONT, LIMIT_S)
    thread.join(LIMIT_S)
    assert latency.note_bytes == 64
    for one in (latency, *found):
        assert 1_000 < one.one_way_ns < 100_000_000
    front.out[0].tensors["x"].fill_(3)
    assert_the_first_arrives(front, back)
    assert (back.into[0].tensors["x"] == 3).all()


@pytest.mark.parametrize("holds_ms", [(4, 8), (4, 8, 6)])
def test_a_round_trip_counts_every_hop(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, holds_ms: tuple[int, ...]
) -> None:
    """Each hop is held up by a known time: a hop's share of a round trip is their mean."""
    places = len(holds_ms) - 1
    layout = SlotLayout(HEADER, (TensorSpec("x", (100,), "uint8"),), 1)
    links = linked(*[LinkShape(layout, layout, 2, 2, GENERATION)] * len(holds_ms))
    for link, hold_ms in zip(links, holds_ms, strict=True):
        send = link.queue_note

        def held(link: CountedLink = link, hold_ms: int = hold_ms, send: Any = send) -> None:
            stream: Any = link.receiving.handle
            stream.queue(lambda: stream.saw(stream.now_ns + hold_ms * NS_PER_MS))
            send()

        monkeypatch.setattr(link, "queue_note", held)

    def measure(place: int) -> latency_probe.LinkLatency:
        return latency_probe.measure(links[place], Position(place, places), LIMIT_S)

    threads = [
        threading.Thread(target=measure, args=(k,), daemon=True) for k in range(1, places + 1)
    ]
    for thread in threads:
        thread.start()
    latency = measure(0)
    for thread in threads:
        thread.join(LIMIT_S)
    assert 6_000_000 <= latency.one_way_ns < 6_100_000


def test_rounds_in_which_devices_wake_up_do_not_count(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips_ns = [2_000_000, 90_000, 20_000, *[22_000] * (latency_probe.ROUNDS - 3)]
    counted = latency_probe.TRIPS - latency_probe.SKIPPED
    passed = iter([number * trip_ns for trip_ns in trips_ns for number in range(counted)])

    class TimedEvent(CudaEvent):
        def ns_since(self, earlier: CudaEvent) -> int:
            return next(passed)

    class Notes:
        """A link whose notes are back at once."""

        name, note_bytes, receiving = "notes", 64, CudaStream()

        def queue_note(self) -> None: ...

        def queue_note_receipt(self) -> None: ...

    monkeypatch.setattr(latency_probe, "CudaEvent", TimedEvent)
    notes: Any = Notes()
    assert latency_probe.measure(notes, FRONT, LIMIT_S) == (10_000, 64)


def test_a_peer_that_does_not_answer_notes_is_lost_and_holds_nothing_up(
    driver: FakeDriver,
) -> None:
    front, _ = ends(puts=True)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="forward no probe messages"):
        latency_probe.measure(front, FRONT, 0.1)
    assert time.monotonic() - began < 2
    assert front.receiving.is_idle()
    assert front.sending.is_idle()


def test_what_a_slot_is_sent_with_is_told_once_and_in_order(driver: FakeDriver) -> None:
    front, back = ends(puts=True, spins=True)
    set_counts(front, back, CYCLE - 2)
    assert [front.message_of(index, (8, index)) for index in range(3)] == [
        (CYCLE - 1, 0, GENERATION, 8, 0),
        (0, 1, GENERATION, 8, 1),
        (1, 2, GENERATION, 8, 2),
    ]
    with pytest.raises(ProtocolError, match="slot 5 was to be sent, 3 is due"):
        front.message_of(5, (8, 5))
    assert [back.count_of(index) for index in range(-2, 2)] == [CYCLE - 3, CYCLE - 2, CYCLE - 1, 0]
