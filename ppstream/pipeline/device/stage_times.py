"""Times of stages A and C of rank 0's GPU with nothing beside them, for the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppstream.core.clock import now_ns
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.flight import Flight

if TYPE_CHECKING:
    from ppstream.pipeline.device.in_flight import Mark
    from ppstream.pipeline.device.rank0_queue import Queueing
    from ppstream.pipeline.device.rank0_stamped import StampedQueueing
    from ppstream.pipeline.device.stage_a import DeviceStageA
    from ppstream.pipeline.loop import Rank0Loop


def time_a_and_c(
    loop: Rank0Loop,
    stage_a: DeviceStageA,
    queueing: Queueing | StampedQueueing,
    slots: int,
    repeats: int,
) -> tuple[list[int], list[int]]:
    """Returns ``repeats`` durations of A and of C, in ns on the device; nothing is in flight.

    Over the slots in turn as in a run: a graph that comes again is quicker.
    """
    newest = (None,) * len(loop.intake.rows)
    durations_a, durations_c = [], []
    for turn in range(repeats):
        index = max(0, loop.started - turn % slots)  # whose credit is there
        marks = queueing.marks[index % len(queueing.marks)]
        loop.drain_inputs()
        stage_a.ingest(now_ns())
        flight = Flight(index, loop.epoch, 0, EnvelopeRecord())
        queueing.stage_a(flight, newest)
        marks.a1.wait()
        stage_a.settle(flight)
        durations_a.append(_between_ns(marks.a0, marks.a1))
        queueing.stage_c(index)
        marks.c1.wait()
        durations_c.append(_between_ns(marks.c0, marks.c1))
    return durations_a, durations_c


def _between_ns(begin: Mark, end: Mark) -> int:
    """Device time between two marks that were passed."""
    elapsed_ns = end.ns_since(begin)
    assert elapsed_ns is not None, "asked of a moment that has not come"
    return elapsed_ns
