from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from memory_rig import LARGE, SIZE, Wire, memory, reopened

from ppstream.core.errors import ProtocolError
from ppstream.wire import message_memory
from ppstream.wire.message_memory import (
    CARRIER,
    CARRIER_BYTES,
    MAGIC,
    MARK,
    PAGE_BYTES,
    PeerMemory,
)

ROOM = 1000


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire() as wire:
        yield wire


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on memories have ``ROOM`` bytes for messages, and are kept while half full."""
    monkeypatch.setattr(message_memory, "ROOM_BYTES", ROOM)
    monkeypatch.setattr(message_memory, "KEPT_BYTES", PAGE_BYTES + ROOM // 2)


def test_a_message_is_read_in_parts_and_into_a_place(wire: Wire) -> None:
    sent = wire.message(LARGE, head=b"head")
    assert len(sent) == 4 + len(LARGE)
    assert (sent.head(6), sent.head(2 * len(LARGE))) == (b"head" + LARGE[:2], b"head" + LARGE)
    place = bytearray(len(LARGE) - 1)
    sent.read_into(memoryview(place), 5)
    assert place == LARGE[1:]
    with pytest.raises(ProtocolError, match="1 bytes are missing"):
        sent.read_into(memoryview(place), 6)


@pytest.mark.usefixtures("small")
def test_only_what_was_read_is_written_over() -> None:
    """Random sizes, reads and drops: each message is read as it was sent, or finds no room."""
    for seed in range(30):
        wire, rng = Wire(), random.Random(seed)
        waiting: list[tuple[bytes, object]] = []
        refused = 0
        for number in range(300):
            if waiting and rng.random() < 0.5:
                body, sent = waiting.pop(0)
                assert sent.head(ROOM) == body  # type: ignore[attr-defined]
                del sent
            body = bytes([number % 256]) * rng.randint(1, ROOM // 3)
            if wire.send(body):
                waiting.append((body, wire.received()))
                held = sum(len(each) for each, _ in waiting)
                assert held <= ROOM
            else:
                refused += 1
        assert 0 < refused < 200
        wire.close()


def test_messages_of_one_at_a_time_lie_in_the_same_place(wire: Wire) -> None:
    places = set()
    for _ in range(5):
        assert wire.send(LARGE)
        carrier = wire.carrier()
        places.add(CARRIER.unpack_from(carrier)[1])
        wire.theirs.message(carrier, len(LARGE))  # and at once not needed any more
    assert places == {PAGE_BYTES}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("before", range(1, 4))
def test_after_any_that_were_read_as_many_find_room_as_at_first(wire: Wire, before: int) -> None:
    for _ in range(5):
        for _ in range(before):
            wire.message(b"a" * 50)
        waiting = [wire.message(b"b" * 250) for _ in range(4)]
        assert not wire.send(b"c")
        waiting.clear()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mark", [(0, 0), (300, 0), (0, 300), (301, 301), (1 << 63, 1 << 63)])
def test_a_mark_that_is_written_meanwhile_or_wrong_frees_nothing(
    wire: Wire, mark: tuple[int, int]
) -> None:
    waiting = wire.message(b"a" * 300)
    os.pwrite(wire.fd, MARK.pack(*mark), 0)
    assert [wire.send(b"b" * 350) for _ in range(3)] == [True, True, False]
    assert waiting.head(ROOM) == b"a" * 300
    os.pwrite(wire.fd, MARK.pack(300, 300), 0)
    assert wire.send(b"b" * 300)


@pytest.mark.usefixtures("small")
def test_a_message_that_is_needed_is_not_written_over_though_later_ones_were_read(
    wire: Wire,
) -> None:
    first, second = wire.message(b"a" * 200), wire.message(b"b" * 200)
    third = wire.message(b"c" * 600)
    del second
    assert not wire.send(b"d")
    assert first.head(ROOM) == b"a" * 200
    del first  # and with it the second
    fourth = wire.message(b"d" * 400)
    assert third.head(ROOM) == b"c" * 600
    assert fourth.head(ROOM) == b"d" * 400


def test_who_sends_on_and_on_while_one_message_is_needed_is_not_remembered_for_ever() -> None:
    fd = memory()
    theirs = PeerMemory(fd, os.close)
    needed = theirs.message(CARRIER.pack(MAGIC, 0, 1, 1), SIZE)
    for mark in range(2, message_memory.WAITING_MAX + 1):
        theirs.message(CARRIER.pack(MAGIC, 0, 1, mark), SIZE)
    with pytest.raises(ProtocolError, match="more messages than"):
        theirs.message(CARRIER.pack(MAGIC, 0, 1, 1 << 20), SIZE)
    del needed
    assert MARK.unpack(os.pread(fd, MARK.size, 0)) == (message_memory.WAITING_MAX,) * 2
    theirs.message(CARRIER.pack(MAGIC, 0, 1, 1 << 20), SIZE)
    assert MARK.unpack(os.pread(fd, MARK.size, 0)) == (1 << 20,) * 2


def test_a_message_tells_where_its_bytes_lie_and_its_memory_is_mapped(wire: Wire) -> None:
    sent = wire.message(LARGE, head=b"head")
    memory_of, at = sent.place(4, len(LARGE))
    assert memory_of is wire.theirs
    with memory_of.map(1 << 20) as mapped:
        assert len(mapped) == 1 << 20
        assert mapped[at : at + len(LARGE)] == LARGE
    with pytest.raises(ProtocolError, match="1 bytes are missing"):
        sent.place(5, len(LARGE))
    small_one = PeerMemory(memory(), os.close)
    with small_one.map(1 << 20) as mapped:
        assert len(mapped) == SIZE


@pytest.mark.usefixtures("small")
def test_what_is_larger_than_the_room_is_refused(wire: Wire) -> None:
    assert not wire.send(bytes(ROOM + 1))
    assert wire.send(bytes(ROOM))


@pytest.mark.usefixtures("small")
def test_memory_that_was_full_once_is_given_back_when_all_is_read(wire: Wire) -> None:
    waiting = []
    for _ in range(3):
        assert wire.send(b"a" * 300)
        waiting.append(wire.received())
    assert wire.brought == 1
    waiting.pop(0)
    assert wire.send(b"b" * 200)
    waiting.append(wire.received())
    assert wire.brought == 1  # some of it waits
    assert waiting[-1].head(ROOM) == b"b" * 200
    waiting.clear()
    before = wire.theirs
    assert wire.send(b"c" * 300)
    assert wire.received().head(ROOM) == b"c" * 300
    assert (wire.brought, wire.theirs is before) == (2, False)
    assert wire.send(b"d" * 300)
    assert (wire.received().head(ROOM), wire.brought) == (b"d" * 300, 2)


def test_a_packet_that_was_not_taken_is_no_message(wire: Wire) -> None:
    wire.near.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            wire.near.send(bytes(CARRIER_BYTES))
    with pytest.raises(BlockingIOError):
        wire.send(LARGE)  # of which nothing is known afterwards
    wire.far.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            wire.far.recv(CARRIER_BYTES)
    assert wire.send(LARGE[::-1])
    assert wire.received().head(len(LARGE)) == LARGE[::-1]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        pytest.param(lambda: memory(seals=0), "size may change", id="not sealed"),
        pytest.param(lambda: memory(seals=fcntl.F_SEAL_GROW), "size may change", id="shrinks"),
        pytest.param(lambda: memory(seals=fcntl.F_SEAL_SHRINK), "size may change", id="grows"),
        pytest.param(lambda: reopened(os.O_WRONLY), "may not be read", id="not to be read"),
        pytest.param(lambda: reopened(os.O_RDONLY), "may not be read", id="not to be written"),
        pytest.param(lambda: reopened(3), "may not be read", id="neither"),
        pytest.param(lambda: reopened(os.O_PATH), "not shared memory", id="a place alone"),
        pytest.param(lambda: os.memfd_create("x"), "size may change", id="never sealed"),
        pytest.param(lambda: os.open("/dev/zero", os.O_RDWR), "not shared memory", id="a device"),
        pytest.param(lambda: os.pipe()[0], "not shared memory", id="a pipe"),
    ],
)
def test_what_is_no_memory_of_a_fixed_size_is_refused_and_stays_the_callers(
    make: Callable[[], int], problem: str
) -> None:
    fd = make()
    with pytest.raises(ProtocolError, match=problem):
        PeerMemory(fd, os.close)
    os.close(fd)


@pytest.mark.parametrize(
    ("at", "size"),
    [(0, 0), (1, SIZE), (SIZE, 1), (SIZE - 1, 2), (1 << 63, 1), ((1 << 64) - 1, SIZE)],
)
def test_a_carrier_of_what_cannot_be_there_is_refused(at: int, size: int) -> None:
    theirs = PeerMemory(memory(), os.close)
    with pytest.raises(ProtocolError, match="of no message"):
        theirs.message(CARRIER.pack(MAGIC, at, size, 1), SIZE)
    with pytest.raises(ProtocolError, match="of no message"):
        theirs.message(CARRIER.pack(b"\xc1" * 8, 0, 1, 1), SIZE)
    assert len(theirs.message(CARRIER.pack(MAGIC, 0, SIZE, 1), SIZE)) == SIZE
    with pytest.raises(EOFError):
        theirs.message(CARRIER.pack(MAGIC, 0, SIZE, 1), SIZE - 1)


def test_what_cannot_be_read_any_more_is_told_and_its_mark_does_no_harm() -> None:
    fd = memory()
    theirs = PeerMemory(fd, os.close)
    for flags, problem in ((os.O_WRONLY, "cannot be read"), (os.O_RDONLY, "too early")):
        sent = theirs.message(CARRIER.pack(MAGIC, 0, SIZE, flags + 5), SIZE)
        path = f"/proc/self/fd/{fd}" if flags == os.O_WRONLY else "/dev/null"
        other = os.open(path, flags)
        os.dup2(other, fd)  # as of pages that were lost
        os.close(other)
        with pytest.raises(ProtocolError, match=problem):
            sent.head(4)
        with pytest.raises(ProtocolError, match=problem):
            sent.read_into(memoryview(bytearray(4)), 0)
        del sent


def test_marks_only_grow_and_are_written_when_a_message_ends() -> None:
    fd = memory()
    theirs = PeerMemory(fd, os.close)
    messages = [theirs.message(CARRIER.pack(MAGIC, 0, 1, mark), SIZE) for mark in (7, 9, 5)]
    found = []
    while messages:
        del messages[0]
        found.append(MARK.unpack(os.pread(fd, MARK.size, 0)))
    assert found == [(7, 7), (9, 9), (9, 9)]


def test_memory_is_closed_behind_the_last_of_its_messages() -> None:
    closed: list[int] = []
    fd = memory()
    theirs = PeerMemory(fd, closed.append)
    message = theirs.message(CARRIER.pack(MAGIC, 0, 1, 1), SIZE)
    del theirs
    assert closed == []
    del message
    assert closed == [fd]
    os.close(fd)


def test_a_sender_takes_memory_for_what_it_sends_alone(wire: Wire) -> None:
    for _ in range(3):
        assert wire.send(LARGE)
        wire.received()
    taken = os.fstat(wire.fd).st_blocks * 512
    assert len(LARGE) <= taken < len(LARGE) + 4 * PAGE_BYTES
    with pytest.raises(PermissionError):
        os.ftruncate(wire.fd, 1)
