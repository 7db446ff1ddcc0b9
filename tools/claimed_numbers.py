"""Claims of a benchmark's own numbers, whose arithmetic is redone at once.

A script's JSON holds ``claims``, a list of ``{kind, numbers, claimed}`` that anybody can audit
again with ``tools/claims_audit.py``. The numbers are those that the script prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

for _room in ("", "kernels"):  # behind an installation
    sys.path.append(str(Path(__file__).resolve().parents[1] / _room))

from ppstream.analysis.claims import audit_claims

Claim = dict[str, Any]
Round = TypeVar("Round")


class ClaimedTime(NamedTuple):
    """Work done, and how long it took."""

    items: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.items / self.seconds


def ratio(what: str, of: float, over: float, claimed: float) -> Claim:
    return _claim("ratio", what, claimed, of=of, over=over)


def throughput(what: str, items: float, seconds: float, claimed: float) -> Claim:
    """``claimed`` items a second."""
    return _claim("throughput", what, claimed, items=items, seconds=seconds)


def median_round(rounds: Sequence[Round], figure: Callable[[Round], float]) -> Round:
    """The round whose ``figure`` is ``statistics.median_low`` of all rounds' figures."""
    return sorted(rounds, key=figure)[(len(rounds) - 1) // 2]


def median_rate(what: str, rounds: Sequence[ClaimedTime], claimed: float) -> Claim:
    """``claimed`` is the median rate of an odd number of rounds: that round made it."""
    items, seconds = median_round(rounds, lambda each: each.rate)
    return throughput(what, items, seconds, claimed)


def bandwidth(what: str, moved_bytes: float, seconds: float, claimed: float) -> Claim:
    """``claimed`` bytes a second."""
    return _claim("bandwidth", what, claimed, bytes=moved_bytes, seconds=seconds)


def pipeline_gain(
    what: str, before: Sequence[float], after: Sequence[float], claimed: float
) -> Claim:
    """Stages beside each other cost their maximum: ``claimed`` is old maximum over new."""
    return _claim("pipeline_gain", what, claimed, before=list(before), after=list(after))


def product(what: str, factors: Sequence[float], claimed: float) -> Claim:
    return _claim("product", what, claimed, factors=list(factors))


def shares(what: str, parts: Sequence[float]) -> Claim:
    """``parts`` are all there is: together 1."""
    return _claim("shares", what, 1.0, parts=list(parts))


def write_audited(path: Path | None, document: Mapping[str, Any], claims: Sequence[Claim]) -> None:
    """Audit the claims and say how that went; then write all as JSON, when a path was given."""
    findings = audit_claims(claims)
    broken = [finding for finding in findings if not finding.holds]
    if findings:
        print(f"claims: {len(findings) - len(broken)} of {len(findings)} follow from their numbers")
    for finding in broken:
        print(f"  BROKEN  {finding.text}")
    if path is not None:
        path.write_text(json.dumps({**document, "claims": list(claims)}, indent=1) + "\n")


def _claim(kind: str, what: str, claimed: float, **numbers: object) -> Claim:
    return {"kind": kind, "what": what, "numbers": numbers, "claimed": claimed}
