"""The kernel that waits for a count on one GPU: when it ends, and what it sees then."""

from __future__ import annotations

import time

import pytest
import torch

from ppstream.cuda.driver import CudaEvent, CudaStream
from ppstream_kernels.cuda_put import Puts, Route
from ppstream_kernels.cuda_stamped import StampedLaunches
from ppstream_kernels.cuda_wait import StampedWait, Waits

COUNTS = (1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 33) + 7)
LONG_S = 0.05  # far beyond what it looks without a pause
MESSAGES = 2000
BYTES = 4096

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("late_s", [0.0, LONG_S])
def test_a_wait_ends_with_its_count_and_not_before(count: int, late_s: float) -> None:
    torch.cuda.set_device(DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    waits = Waits(DEVICE, counter.data_ptr())
    waiting, writing, done = CudaStream(), CudaStream(), CudaEvent()
    writing.write_value(counter.data_ptr(), count - 1)
    torch.cuda.synchronize()
    waits.queue(count, waiting.handle)
    waiting.record(done)
    time.sleep(0.005 + late_s)
    assert not done.is_done()
    writing.write_value(counter.data_ptr(), count)
    done.wait()
    assert waiting.is_idle()


def test_a_count_far_ahead_ends_it_as_a_release_does() -> None:
    torch.cuda.set_device(DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    waits = Waits(DEVICE, counter.data_ptr())
    waiting, writing = CudaStream(), CudaStream()
    for count in range(1, 9):
        waits.queue(count, waiting.handle)
    writing.write_value(counter.data_ptr(), 1 << 30)
    torch.cuda.synchronize()


def test_what_was_sent_before_the_count_is_seen_behind_the_wait() -> None:
    """Every message fills one slot that the reader copies out as soon as it is counted."""
    torch.cuda.set_device(DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    credit = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    source = torch.empty(BYTES // 8, dtype=torch.int64, device=DEVICE)
    slot = torch.zeros_like(source)
    found = torch.zeros(MESSAGES, dtype=torch.int64, device=DEVICE)
    data = Waits(DEVICE, counter.data_ptr())
    free = Waits(DEVICE, credit.data_ptr())
    puts = Puts(DEVICE, [Route(source.data_ptr(), slot.data_ptr(), BYTES)], counter.data_ptr())
    acks = Puts(DEVICE, [Route(source.data_ptr(), slot.data_ptr(), 0)], credit.data_ptr())
    sender, reader = torch.cuda.Stream(), torch.cuda.Stream()
    streams = [CudaStream(stream.cuda_stream) for stream in (sender, reader)]
    for _ in range(2):  # once more when everything is loaded
        with torch.cuda.stream(reader):
            found[0] = (slot == slot[0]).sum()
        with torch.cuda.stream(sender):
            source.fill_(0)
        torch.cuda.synchronize()
    for message in range(MESSAGES):
        with torch.cuda.stream(sender):
            free.queue(message, streams[0].handle)
            source.fill_(message)
            puts.queue(0, message + 1, streams[0].handle)
        with torch.cuda.stream(reader):
            data.queue(message + 1, streams[1].handle)
            found[message] = (slot == message).sum()
            acks.queue(0, message + 1, streams[1].handle)
        if message % 100 == 99:  # the host must not run further ahead than a stream holds
            sender.synchronize()
    torch.cuda.synchronize()
    assert (found == BYTES // 8).all()


def test_a_stamped_wait_ends_with_both_counts_and_its_stamp_is_no_sooner() -> None:
    torch.cuda.set_device(DEVICE)
    counters = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    words = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    words[0], words[1] = 5, 3  # counts that are waited for
    at = words.data_ptr()
    call = StampedWait(counters.data_ptr(), at, at + 32, counters.data_ptr() + 8)
    launches = StampedLaunches(DEVICE, 0)
    told = StampedWait(counters.data_ptr() + 8, at + 8, at + 40)
    waiting, writing = CudaStream(), CudaStream()
    launches.wait(call).queue(waiting.handle)
    for count, address in ((5, counters.data_ptr()), (2, counters.data_ptr() + 8)):
        writing.write_value(address, count)
        time.sleep(0.01)
        assert words[4] == 0
    writing.write_value(counters.data_ptr() + 8, 3)
    launches.wait(told).queue(writing.handle)
    torch.cuda.synchronize()
    assert words[5] > 0
    assert abs(int(words[4]) - int(words[5])) < 1_000_000
