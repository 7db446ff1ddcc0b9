"""Offset of a policy rank's clock from rank 0's: for pictures and traces, never for a gate.

Pure. Ranks of one boot of one host share CLOCK_MONOTONIC. Otherwise causality alone bounds the
offset: B cannot begin before its envelope was sent, nor end after its result was received. Drift
within the run narrows nothing and may empty the bounds; then the middle is used and marked so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppstream.analysis.places import has_one_clock
from ppstream.analysis.records import Envelope, RunLog

NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """``policy clock - rank 0's clock``, and by how much it may be off; in ns."""

    offset_ns: int
    uncertainty_ns: int
    shared: bool  # one clock: nothing was estimated
    consistent: bool  # False: no single offset fits all envelopes (drift, or wrong stamps)

    @property
    def text(self) -> str:
        if self.shared:
            return "one clock"
        around = f"clock offset known to ± {self.uncertainty_ns / NS_PER_US:.0f} µs"
        return around if self.consistent else f"{around}, and no single offset fits all envelopes"


def policy_clock(run: RunLog, envelopes: Iterable[Envelope], place: int = 1) -> ClockOffset | None:
    """A place's offset for ``envelopes`` (of one generation); None where it logged no B."""
    if has_one_clock(run.manifest):
        return ClockOffset(0, 0, shared=True, consistent=True)
    least, most = [], []
    for e in envelopes:
        line = e.places[place - 1] if place <= len(e.places) else None
        if line is None or line.tB0 is None or line.tB1 is None:
            continue
        if e.tSend is not None and e.tRecv is not None:
            most.append(line.tB0 - e.tSend)
            least.append(line.tB1 - e.tRecv)
    if not most:
        return None
    low, high = max(least), min(most)
    return ClockOffset(
        (low + high) // 2, abs(high - low) // 2, shared=False, consistent=low <= high
    )


def policy_clocks(run: RunLog, envelopes: Sequence[Envelope]) -> tuple[ClockOffset | None, ...]:
    """Of every place, in their order; of replicas of each one."""
    if run.topology.has_replicas:
        ranks = run.topology.replica_ranks
        by_rank = [[e for e in envelopes if e.answered_by == rank] for rank in ranks]
        return tuple(policy_clock(run, mine) for mine in by_rank)
    return tuple(policy_clock(run, envelopes, place) for place in run.topology.ranks)
