"""A launch may begin while the one before it ends: it must see all of that, and disturb none of it.

The first call is so wide that it takes long after it has let the second one in, and comes last to
what the second one touches. A graph queues them close enough to overlap.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ppstream_kernels import Resampled, resample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROWS, SLOTS, TARGETS = 2, 64, 32
WIDE, NARROW = 65_536, 8
REPLAYS = 20


class Call:
    """Two rows of ``src`` at every second sample and a bit, written into ``out``."""

    def __init__(self, src: Tensor) -> None:
        slots = src.shape[1]
        self.src, self.src_ns = src, (torch.arange(slots, device="cuda") * 10).repeat(ROWS, 1)
        targets_ns = torch.arange(TARGETS, device="cuda") * (10 * slots // TARGETS) + 3
        self.tgt_ns = targets_ns.repeat(ROWS, 1)
        self.out = resample(src, self.src_ns, self.tgt_ns)

    def __call__(self) -> None:
        resample(self.src, self.src_ns, self.tgt_ns, out=self.out)

    def alone(self) -> Tensor:
        """Its result with nothing to overlap."""
        torch.cuda.synchronize()
        self()
        torch.cuda.synchronize()
        return self.out.values.clone()


def recorded(*calls: Call) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def test_a_call_sees_what_the_call_before_it_writes() -> None:
    slow = Call(torch.randn(ROWS, SLOTS, WIDE).cuda())
    quick = Call(slow.out.values[:, :, -NARROW:])
    graph = recorded(slow, quick)
    for _ in range(REPLAYS):
        slow.src.normal_()
        graph.replay()
        torch.cuda.synchronize()
        seen = quick.out.values.clone()
        slow.alone()
        assert torch.equal(seen, quick.alone())


def test_a_call_does_not_overwrite_what_the_call_before_it_reads() -> None:
    slow = Call(torch.randn(ROWS, SLOTS, WIDE).cuda())
    quick = Call(torch.randn(ROWS, SLOTS, NARROW).cuda())
    end_of_last_sample = slow.src.view(-1)[-ROWS * TARGETS :].view(ROWS, TARGETS)
    quick.out = Resampled(quick.out.values, quick.out.valid, end_of_last_sample)
    graph = recorded(slow, quick)
    for _ in range(REPLAYS):
        slow.src.normal_()
        wanted = slow.alone()
        graph.replay()
        torch.cuda.synchronize()
        assert not end_of_last_sample.any()  # every target lies between samples: its age is 0
        assert torch.equal(slow.out.values, wanted)
