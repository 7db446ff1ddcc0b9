from __future__ import annotations

import ctypes
from typing import Any

import pytest
from fake_put import Message, StampedMessage

from ppstream_kernels.cuda_put import (
    HEADER_WORDS,
    Route,
    Stamps,
    grid,
    pack_count,
    pack_header,
    pack_route,
    pack_stamped,
)


def packed(messages: int) -> Any:
    return ctypes.create_string_buffer(messages * ctypes.sizeof(Message))


def message(memory: Any, number: int) -> Message:
    return Message.from_buffer_copy(memory, number * ctypes.sizeof(Message))


def test_every_field_is_where_the_kernel_reads_it() -> None:
    memory = packed(3)
    pack_route(memory, 1, Route(11, 12, 13), 14, 15)
    pack_count(memory, 1, 16)
    pack_header(memory, 1, range(20, 20 + HEADER_WORDS))
    found = message(memory, 1)
    fixed = [found.source, found.target, found.bytes, found.counter, found.arrived, found.value]
    assert fixed == [11, 12, 13, 14, 15, 16]
    assert found.header_words == HEADER_WORDS
    assert list(found.header) == [*range(20, 20 + HEADER_WORDS)]
    for other in (0, 2):
        assert bytes(message(memory, other)) == bytes(ctypes.sizeof(Message))


def test_a_launch_that_never_changes_names_every_word_that_it_reads_and_writes() -> None:
    stamps = Stamps(21, 22, 23, 24, 25, 26)
    packed = pack_stamped(Route(11, 12, 13), 14, 15, stamps, 5)
    found = StampedMessage.from_buffer_copy(packed)
    assert ctypes.sizeof(StampedMessage) == len(packed)
    sent = found.message
    fixed = [sent.source, sent.target, sent.bytes, sent.counter, sent.arrived, sent.header_words]
    assert fixed == [11, 12, 13, 14, 15, 5]
    assert [found.now, found.began, found.ended] == [21, 22, 23]
    assert [found.names, found.named, found.name_words] == [24, 25, 26]


def test_a_header_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        pack_header(packed(1), 0, range(HEADER_WORDS + 1))


@pytest.mark.parametrize("size", [0, 1, 16, 64, 4096, 32768, 32769, 65536, 1 << 20, 1 << 30])
def test_a_message_gets_as_many_threads_as_it_has_vectors_within_bounds(size: int) -> None:
    blocks, threads = grid(size)
    assert 1 <= blocks <= 32
    assert threads % 32 == 0
    assert HEADER_WORDS <= threads <= 1024  # block 0 writes the header, a word a thread
    if size <= 32 << 15:  # up to there a thread has two vectors at most
        assert blocks * threads * 32 >= size
    assert blocks == 1 or size > 32768
