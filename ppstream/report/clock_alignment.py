"""Offset of the policy rank's clock from rank 0's: for pictures and traces, never for a gate.

Pure. Ranks of one boot of one host share CLOCK_MONOTONIC. Otherwise causality alone bounds the
offset: B cannot begin before its envelope was sent, nor end after its result was received. Drift
within the run narrows nothing and may empty the bounds; then the middle is used and marked so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


def policy_clock(run: RunLog, envelopes: Iterable[Envelope]) -> ClockOffset | None:
    """The offset for ``envelopes`` (of one generation); None where the policy rank logged no B."""
    if _is_shared(run.manifest):
        return ClockOffset(0, 0, shared=True, consistent=True)
    least, most = [], []
    for e in envelopes:
        if e.stage1 is None or e.stage1.tB0 is None or e.stage1.tB1 is None:
            continue
        if e.tSend is not None and e.tRecv is not None:
            most.append(e.stage1.tB0 - e.tSend)
            least.append(e.stage1.tB1 - e.tRecv)
    if not most:
        return None
    low, high = max(least), min(most)
    return ClockOffset(
        (low + high) // 2, abs(high - low) // 2, shared=False, consistent=low <= high
    )


def _is_shared(manifest: Mapping[str, object]) -> bool:
    topology = manifest.get("topology")
    ranks = topology.get("ranks") if isinstance(topology, Mapping) else None
    if not isinstance(ranks, list) or len(ranks) < 2:
        return False
    boots = {rank.get("boot_id") for rank in ranks if isinstance(rank, Mapping)}
    return len(boots) == 1 and boots != {None} and boots != {""}
