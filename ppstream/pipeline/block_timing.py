"""A run in attribution mode: times blocks with the pipeline saturated, and what that costs it.

Throughput, attribution, throughput in turn, so that a machine that slows down meanwhile is not
taken for the price of attribution. Such a run never becomes *ready* and emits to nobody. On a
device-ordered link A and C are timed by their own events as ever: the host waits in B alone.
"""

from __future__ import annotations

import logging
from statistics import median
from typing import TYPE_CHECKING, Final

import torch

from ppstream.core.clock import now_ns
from ppstream.observe.attribution import Attribution, end_of_stream
from ppstream.pipeline.inline import Inline
from ppstream.pipeline.pacing import Saturated

if TYPE_CHECKING:
    from ppstream.ingest.intake import Intake
    from ppstream.ingest.sources import Source
    from ppstream.pipeline.rank0 import Rank0

logger = logging.getLogger("ppstream")

TOGETHER: Final = 50  # envelopes timed as one; of such times the median is taken
STOP_REASON: Final = "the blocks are timed; a run in attribution mode never becomes ready"


def time_blocks(rank0: Rank0, intake: Intake, source: Source) -> None:
    """Log event ``attribution`` has both periods and their ratio, the perturbation; then stop."""
    runs_policy = isinstance(rank0, Inline)  # else blocks here are a decoder's, on the host
    device = torch.device(rank0.config.placement.policy if runs_policy else "cpu")
    attribution = Attribution(rank0.log, end_of_stream(device))
    envelopes = rank0.config.bringup.envelopes
    plain_ns = _periods_ns(rank0, intake, source, "warming", envelopes // 2)
    attribution.start()
    try:
        period_ns = median(_periods_ns(rank0, intake, source, "bring-up", envelopes))
    finally:
        attribution.stop()
    plain_ns += _periods_ns(rank0, intake, source, "warming", envelopes // 2)
    throughput_ns = median(plain_ns)
    perturbation = period_ns / throughput_ns
    rank0.log.event(
        "attribution",
        period_ns=round(period_ns),
        throughput_period_ns=round(throughput_ns),
        perturbation=perturbation,
    )
    logger.info("attribution: period x %.3f of throughput mode", perturbation)
    rank0.request_stop(STOP_REASON)


def _periods_ns(
    rank0: Rank0, intake: Intake, source: Source, phase: str, envelopes: int
) -> list[float]:
    """Mean period of every ``TOGETHER``; a policy rank times its blocks in ``bring-up`` alone."""
    rank0.enter(phase, intake=intake, source=source, pacing=Saturated(intake.rows))
    found = []
    for _ in range(envelopes // TOGETHER):
        began = now_ns()
        rank0.run(TOGETHER)
        found.append((now_ns() - began) / TOGETHER)
    return found
