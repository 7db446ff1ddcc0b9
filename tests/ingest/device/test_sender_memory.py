"""Memories that a GPU would read, with the driver's calls noted. Its copies: test_device_window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_rig import LARGE, SIZE, Wire, memory
from stream_cases import stream

from ppstream.config.schema import ImageConfig
from ppstream.core.errors import ProtocolError
from ppstream.cuda.driver import DeviceError
from ppstream.ingest.device import sender_memory
from ppstream.ingest.device.sender_memory import KeptFrames, SenderMemories
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput
from ppstream.wire.message_memory import CARRIER, MAGIC, MARK, PAGE_BYTES, PeerMemory


class Driver:
    """``locked``: bytes by address; a refusal costs nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False
        monkeypatch.setattr(sender_memory, "register_host", self._lock)
        monkeypatch.setattr(sender_memory, "unregister_host", self._unlock)

    def _lock(self, address: int, size: int) -> int:
        if self.refuses:
            raise DeviceError("pinning shared memory")
        assert address % PAGE_BYTES == 0
        self.locked[address] = size
        return address

    def _unlock(self, address: int) -> None:
        assert f"{address:x}-" in Path("/proc/self/maps").read_text(), "it is mapped until then"
        del self.locked[address]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire() as wire:
        yield wire


def test_each_memory_is_locked_once_and_a_frame_has_its_place_there(
    driver: Driver, wire: Wire
) -> None:
    senders = SenderMemories()
    for number in range(3):
        sent = wire.message(LARGE, head=b"head")
        frame = senders.frame(number, sent, 4, len(LARGE))
        assert frame is not None
        ((address, size),) = driver.locked.items()
        assert (frame.number, frame.address) == (number, address + PAGE_BYTES + 4)
        assert size == sender_memory.LOCKED_BYTES
        with pytest.raises(ProtocolError, match="1 bytes are missing"):
            senders.frame(number, sent, 5, len(LARGE))
        del sent, frame


def test_a_frame_stays_as_long_as_it_is_kept(driver: Driver, wire: Wire) -> None:
    senders = SenderMemories()
    kept = senders.frame(0, wire.message(LARGE), 0, len(LARGE))
    assert MARK.unpack(wire.read_mark()) == (0, 0)
    wire.message(LARGE)  # and at once not needed
    assert MARK.unpack(wire.read_mark()) == (0, 0)
    del kept
    assert MARK.unpack(wire.read_mark()) == (2 * len(LARGE), 2 * len(LARGE))
    assert driver.locked


def test_what_lies_further_behind_or_cannot_be_locked_is_the_cpus(
    driver: Driver, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = SenderMemories()
    monkeypatch.setattr(sender_memory, "LOCKED_BYTES", PAGE_BYTES + len(LARGE) + 1)
    first, second = wire.message(LARGE), wire.message(LARGE)
    assert senders.frame(0, first, 0, len(LARGE)) is not None
    assert senders.frame(1, second, 0, len(LARGE)) is None
    assert len(driver.locked) == 1
    driver.refuses = True
    with Wire() as other:
        assert senders.frame(2, other.message(LARGE), 0, len(LARGE)) is None
        driver.refuses = False
        assert senders.frame(3, other.message(LARGE), 0, len(LARGE)) is None  # nor later
    monkeypatch.setattr(sender_memory, "LOCKED_MAX", 1)
    with Wire() as other:
        assert senders.frame(4, other.message(LARGE), 0, len(LARGE)) is None
    assert len(driver.locked) == 1


def test_a_ring_keeps_frames_by_their_numbers_and_each_is_taken_once(
    driver: Driver, wire: Wire
) -> None:
    camera = stream("front", dim=len(LARGE), dtype="uint8", image=ImageConfig(height=1, width=1))
    row = RowInput({"front": RingBank(camera, 1, 2)}, 0, "front")
    row.open(7)
    ring, senders = row.reference, SenderMemories()
    kept = KeptFrames(ring, senders)
    for number in range(3):
        stamp = (10**12 + number).to_bytes(8, "little")
        assert ring.append_frame(stamp, wire.message(LARGE), 0, 10**12) == 1
    assert kept.take(0) is None  # the third lies in its place
    for number in (1, 2):
        found = kept.take(number)
        assert found is not None
        assert found.number == number
        assert kept.take(number) is None
    KeptFrames(ring, senders)
    assert (ring.count, ring.ledger.dropped) == (0, {"overwritten": 3})
    ring.check()


def test_an_empty_ring_keeps_no_frame_from_its_sender(driver: Driver, wire: Wire) -> None:
    """Nobody asks for it any more, and its sender would run out of room."""
    camera = stream("front", dim=len(LARGE), dtype="uint8", image=ImageConfig(height=1, width=1))
    row = RowInput({"front": RingBank(camera, 1, 4)}, 0, "front")
    row.open(7)
    KeptFrames(row.reference, SenderMemories())
    stamp = (10**12).to_bytes(8, "little")
    assert row.reference.append_frame(stamp, wire.message(LARGE), 0, 10**12) == 1
    assert MARK.unpack(wire.read_mark()) == (0, 0)
    row.new_episode()
    assert MARK.unpack(wire.read_mark()) == (len(LARGE), len(LARGE))


def test_a_memory_that_cannot_be_mapped_is_the_cpus_and_a_small_one_is_mapped_whole(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = SenderMemories()

    def refuse(memory: PeerMemory, size: int) -> None:
        raise OSError("no memory")

    theirs = PeerMemory(memory(), lambda _: None)
    message = theirs.message(CARRIER.pack(MAGIC, 0, SIZE, 1), SIZE)
    assert senders.frame(0, message, 0, SIZE) is not None
    assert [*driver.locked.values()] == [SIZE]
    monkeypatch.setattr(PeerMemory, "map", refuse)
    other = PeerMemory(memory(), lambda _: None)
    assert senders.frame(0, other.message(CARRIER.pack(MAGIC, 0, 9, 1), SIZE), 0, 9) is None


def test_what_nobody_sends_to_is_unlocked_when_that_is_asked_for(driver: Driver) -> None:
    senders = SenderMemories()
    wires = [Wire() for _ in range(2)]
    for number, wire in enumerate(wires):
        senders.frame(number, wire.message(LARGE), 0, len(LARGE))
    one, other = driver.locked
    senders.unlock_gone()
    assert [*driver.locked] == [one, other]
    wires.pop(0).close()
    del wire
    assert [*driver.locked] == [one, other]
    senders.unlock_gone()
    assert [*driver.locked] == [other]
    sent = wires[0].message(LARGE)
    assert senders.frame(2, sent, 0, len(LARGE)) is not None
    senders.close()
    assert not driver.locked
    assert senders.frame(3, sent, 0, len(LARGE)) is None
    wires.pop().close()
    del sent
    senders.unlock_gone()  # of what was unlocked before
