"""The device's time by a word in pinned memory: it runs as the host's does, and is told again."""

from __future__ import annotations

import time

import pytest
import torch

from ppstream.cuda.device_clock import RENEW_NS, TRIES, DeviceClock
from ppstream.cuda.device_stamps import SlotWords, StampProbe
from ppstream.cuda.driver import CudaStream
from ppstream_kernels.cuda_clock import ClockAnswers
from ppstream_kernels.cuda_stamped import StampedLaunches
from ppstream_kernels.cuda_wait import StampedWait

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def clock() -> DeviceClock:
    torch.cuda.set_device(DEVICE)
    return DeviceClock(StampProbe(ClockAnswers(DEVICE, TRIES), CudaStream()))


def test_a_kernels_stamp_lies_between_the_hosts_readings_around_it(clock: DeviceClock) -> None:
    slots, counter = SlotWords(1, 8), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    call = StampedWait(counter.data_ptr(), slots.address(0, 0), slots.address(0, 2))
    launch, stream = StampedLaunches(DEVICE, 0).wait(call), CudaStream()
    stamp = slots.stamp(0, 2)
    for _ in range(50):
        slots.words[2] = 0
        before_ns = time.monotonic_ns()
        launch.queue(stream.handle)
        stamp.wait()
        after_ns = time.monotonic_ns()
        bound_ns = clock.state.bracket_ns + 1000
        assert before_ns - bound_ns <= clock.past_ns(stamp) <= after_ns + bound_ns


def test_it_is_renewed_each_second_and_says_how_well(clock: DeviceClock) -> None:
    states = [clock.state]
    while len(states) < 4:
        time.sleep(RENEW_NS / 1e9)
        if clock.renew_when_due():
            states.append(clock.state)
    print(states)
    assert all(0 < state.bracket_ns < 40_000 for state in states)
    assert all(abs(state.surprise_ns) < 100_000 for state in states)
