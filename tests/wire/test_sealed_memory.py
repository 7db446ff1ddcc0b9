from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from ppstream.core.errors import ProtocolError
from ppstream.wire.sealed_memory import SPARES_MAX, SealedMessage, SpareMemory

BODY, TAIL = b"head", memoryview(bytes(range(256)) * 600)
SIZE = len(BODY) + TAIL.nbytes


@pytest.fixture
def spares() -> Iterator[SpareMemory]:
    spares = SpareMemory()
    yield spares
    spares.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each memory that is made from now on."""
    made: list[str] = []
    make = os.memfd_create

    def noted(name: str, flags: int) -> int:
        made.append(name)
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", noted)
    return made


def message(spares: SpareMemory, body: bytes = BODY) -> SealedMessage:
    return SealedMessage(spares.sealed(body, TAIL), len(body) + TAIL.nbytes)


def test_a_message_is_read_in_parts_into_a_place_and_where_it_lies(spares: SpareMemory) -> None:
    sent = message(spares)
    assert len(sent) == SIZE
    assert (sent.head(6), sent.head(2 * SIZE)) == (BODY + TAIL[:2], BODY + TAIL)
    place = bytearray(TAIL.nbytes)
    sent.read_into(memoryview(place), len(BODY))
    assert place == TAIL
    assert sent.mapped() == BODY + TAIL
    with pytest.raises(EOFError, match="1 bytes are missing behind"):
        sent.read_into(memoryview(bytearray(SIZE + 1)), 0)


def test_nobody_changes_a_message_once_it_is_sealed(spares: SpareMemory) -> None:
    fd = spares.sealed(BODY, TAIL)
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    assert SealedMessage(fd, SIZE).head(SIZE) == BODY + TAIL


def test_memory_that_cannot_be_read_is_no_message(spares: SpareMemory) -> None:
    fd = spares.sealed(BODY, TAIL)
    written = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    with pytest.raises(ProtocolError, match="may not be read"):
        SealedMessage(written, SIZE)
    sent = SealedMessage(fd, SIZE)
    os.dup2(written, fd)  # reading fails from now on, as of a page that was lost
    os.close(written)
    for read in (lambda: sent.head(4), lambda: sent.read_into(memoryview(bytearray(4)), 0)):
        with pytest.raises(ProtocolError, match="cannot be read"):
            read()


def test_a_message_ends_with_its_descriptor_and_leaves_a_refused_one(spares: SpareMemory) -> None:
    fd = spares.sealed(BODY, TAIL)
    with pytest.raises(ProtocolError, match="of another size"):
        SealedMessage(fd, SIZE - 1)
    os.fstat(fd)
    ended = SealedMessage(fd, SIZE)
    del ended
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_is_prepared_for_what_was_sent_and_used_once(
    spares: SpareMemory, made: list[str]
) -> None:
    spares.prepare()
    assert made == []
    for _ in range(2):
        message(spares)
    spares.prepare()
    spares.prepare()
    assert len(made) == 4
    assert message(spares, b"a head of another size").head(6) == b"a head"
    assert len(made) == 5
    assert [message(spares).mapped() == BODY + TAIL for _ in range(3)] == [True] * 3
    assert len(made) == 6


def test_few_memories_wait_and_none_when_closed(spares: SpareMemory, made: list[str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for _ in range(SPARES_MAX):
            message(spares, b"%d" % len(made) * len(made))
        spares.prepare()
        assert len(os.listdir("/proc/self/fd")) == before + SPARES_MAX
    spares.close()
    assert len(os.listdir("/proc/self/fd")) == before
