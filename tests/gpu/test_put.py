"""The put kernel on one GPU: every byte of a message, none beside it, and the count behind it."""

from __future__ import annotations

import pytest
import torch

from ppstream_kernels.cuda_put import HEADER_WORDS, Puts, Route, Stamps
from ppstream_kernels.cuda_stamped import StampedLaunches

POISON = 0xA5
MARGIN = 64
COUNTS = (1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 33) + 7)
SIZES = (8, 64, 112, 128, 1000, 1024, 4096, 32768, 32800, 65536, 100_003, (1 << 20) + 5)

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


class Both:
    """A source and a poisoned target on one device, with room on both sides."""

    def __init__(self, size: int, source_at: int = 0, target_at: int = 0) -> None:
        self.size = size
        room = size + 2 * MARGIN
        self.source = torch.randint(0, 256, (room,), dtype=torch.uint8, device=DEVICE)
        self.target = torch.full((room,), POISON, dtype=torch.uint8, device=DEVICE)
        self.counter = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        self.first, self.last = MARGIN + target_at, MARGIN + target_at + size
        self.sent = self.source[MARGIN + source_at :][:size]
        route = Route(self.sent.data_ptr(), self.target.data_ptr() + self.first, size)
        self.puts = Puts(DEVICE, [route], self.counter.data_ptr())

    def put(self, count: int) -> None:
        self.puts.queue(0, count, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

    def check(self, header: list[int], count: int) -> None:
        expected = self.sent.clone()
        words = torch.tensor(header, dtype=torch.int64, device=DEVICE)
        expected[: 8 * len(header)] = words.view(torch.uint8)
        assert torch.equal(self.target[self.first : self.last], expected)
        assert (self.target[: self.first] == POISON).all()
        assert (self.target[self.last :] == POISON).all()
        assert self.counter.view(torch.uint8).cpu().numpy().view("uint32").tolist() == [
            count % (1 << 32),
            0,
        ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source_at", [0, 16, 8, 3])
@pytest.mark.parametrize("target_at", [0, 8, 1])
def test_a_message_arrives_whole_and_nothing_beside_it(
    size: int, source_at: int, target_at: int
) -> None:
    both = Both(size, source_at, target_at)
    header: list[int] = []
    for count in COUNTS[:2]:
        both.put(count)
        both.check(header, count)
        header = [-(5**n) for n in range(min(size // 8, 5))]
        both.puts.write_header(0, header)
    both.put(3)
    both.check(header, 3)


@pytest.mark.parametrize("count", COUNTS)
def test_the_counter_takes_the_lower_32_bits(count: int) -> None:
    both = Both(4096)
    both.puts.write_header(0, [1 << 62] * HEADER_WORDS)
    both.put(count)
    both.check([1 << 62] * HEADER_WORDS, count)


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_messages_of_one_stream_are_sent_one_after_the_other(size: int) -> None:
    """What changes the source behind a message is not in it; many launches leave nothing behind."""
    both = Both(size)
    copies = torch.empty(100, size, dtype=torch.uint8, device=DEVICE)
    counts = torch.empty(100, dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.current_stream().cuda_stream
    for message in range(100):
        both.sent.fill_(message)
        both.puts.queue(0, message + 1, stream)
        both.sent.fill_(255)
        copies[message].copy_(both.target[both.first : both.last])
        counts[message].copy_(both.counter[0])
    assert (copies == torch.arange(100, device=DEVICE)[:, None]).all()
    assert torch.equal(counts.long(), torch.arange(1, 101, device=DEVICE))


@pytest.mark.parametrize("size", SIZES)
def test_a_launch_that_never_changes_sends_what_its_words_say_and_leaves_its_times(
    size: int,
) -> None:
    both = Both(size)
    names = 3
    words = torch.zeros(32, dtype=torch.int64, pin_memory=True)
    named = torch.tensor([7, 8, 9], dtype=torch.int64, device=DEVICE)
    now, began, ended, copied = (words.data_ptr() + 8 * at for at in (0, 16, 17, 20))
    stamps = Stamps(now, began, ended, copied, named.data_ptr(), names)
    header_words = min(size // 8, 5)
    route = Route(both.sent.data_ptr(), both.target.data_ptr() + both.first, size)
    launch = StampedLaunches(DEVICE, 1).put(route, both.counter.data_ptr(), stamps, header_words)
    newest = 0
    for count in COUNTS:
        header = [-(5**n) * (count % 1000) for n in range(header_words)]
        words[: 1 + header_words] = torch.tensor([count % (1 << 32), *header])
        words[16:23] = 0
        launch.queue(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        both.check(header, count)
        assert newest < int(words[16]) <= int(words[17])
        newest = int(words[17])
        assert words[20:24].tolist() == [7, 8, 9, 0]


def test_a_graph_holds_it_and_reads_its_words_anew() -> None:
    size = 4096
    both = Both(size)
    words = torch.zeros(32, dtype=torch.int64, pin_memory=True)
    stamps = Stamps(*(words.data_ptr() + 8 * at for at in (0, 16, 17)))
    route = Route(both.sent.data_ptr(), both.target.data_ptr() + both.first, size)
    launch = StampedLaunches(DEVICE, 1).put(route, both.counter.data_ptr(), stamps, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.queue(torch.cuda.current_stream().cuda_stream)
    for count in (4, 9):
        words[:3] = torch.tensor([count, count + 1, count + 2])
        graph.replay()
        torch.cuda.synchronize()
        both.check([count + 1, count + 2], count)
