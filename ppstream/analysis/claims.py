"""Claims audit: does a published number follow from the numbers that stand beside it?

Pure. It redoes arithmetic and knows what cannot be true together; it does not measure, and a claim
that holds here may still rest on a bad measurement. A claim is ``{kind, numbers, claimed}``, with
an optional ``what`` for people. Kinds and their numbers stand in ``RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ppstream.core.errors import ClaimError

Json = Mapping[str, object]

TWO_SHAPES: Final = 0.9  # of the largest spread that min, mean and max allow
DISAGREEMENT_MAX: Final = 0.10  # profiler against benchmark: beyond it they measured two things


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim after the audit."""

    kind: str
    what: str
    claimed: float
    recomputed: float
    limit: float  # largest difference that rounding explains, in the claim's unit
    holds: bool

    @property
    def text(self) -> str:
        """One line for people."""
        subject = f"{self.what}: " if self.what else ""
        if self.holds:
            return f"{subject}{self.kind} {self.claimed:.6g} follows from its numbers"
        if self.kind == "agreement":
            return (
                f"{subject}two measurements of one thing differ by {self.recomputed:.1%}, allowed "
                f"{self.limit:.0%}; say which of them is the product's and why the other is not"
            )
        return (
            f"{subject}{self.kind} is claimed to be {self.claimed:.6g}, its numbers give "
            f"{self.recomputed:.6g}; {RULES[self.kind].remedy}"
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """The arithmetic of one kind of claim, and how far rounding may take it."""

    needs: tuple[str, ...]
    recompute: Callable[[Numbers], float]
    relative: float = 0.02
    absolute: float = 0.0
    remedy: str = "recompute it from the numbers beside it"


class Numbers:
    """The numbers of one claim by name; each access names what is missing or no number."""

    def __init__(self, table: Json, where: str) -> None:
        self._table, self._where = table, where

    def has(self, name: str) -> bool:
        return name in self._table

    def one(self, name: str) -> float:
        return _number(self._table.get(name), f"{self._where}: numbers.{name}")

    def positive(self, name: str) -> float:
        value = self.one(name)
        if value <= 0:
            raise ClaimError(f"{self._where}: numbers.{name} is {value:g}, must be above 0")
        return value

    def several(self, name: str) -> list[float]:
        values = self._table.get(name)
        where = f"{self._where}: numbers.{name}"
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ClaimError(f"{where} is {values!r}, expected a list of numbers")
        return [_number(value, where) for value in values]


def audit_claims(claims: Iterable[object]) -> list[Finding]:
    """Redo every claim.

    Args:
        claims: decoded JSON objects ``{kind, numbers, claimed}``.

    Raises:
        ClaimError: not such an object, an unknown kind, or a number is missing.
    """
    return [_audit(claim, f"claim {number}") for number, claim in enumerate(claims, start=1)]


def claims_of(document: object) -> list[object]:
    """The claims of a decoded file: a list of them, or an object that holds ``claims``.

    Raises:
        ClaimError: neither.
    """
    found = document.get("claims") if isinstance(document, Mapping) else document
    if not isinstance(found, list):
        raise ClaimError(
            "no claims here: expected a list of {kind, numbers, claimed}, or an "
            "object with such a list under 'claims'"
        )
    return found


def _audit(claim: object, where: str) -> Finding:
    if not isinstance(claim, Mapping) or not isinstance(claim.get("numbers"), Mapping):
        raise ClaimError(f"{where}: expected {{kind, numbers, claimed}}, found {claim!r:.80}")
    kind = str(claim.get("kind"))
    if kind not in RULES:
        raise ClaimError(f"{where}: kind is {kind!r}, known: {', '.join(RULES)}")
    rule = RULES[kind]
    numbers = Numbers(claim["numbers"], where)
    lacking = [name for name in rule.needs if not numbers.has(name)]
    if lacking:
        raise ClaimError(f"{where}: {kind} needs numbers.{', numbers.'.join(lacking)}")
    claimed = _number(claim.get("claimed"), f"{where}: claimed")
    recomputed = rule.recompute(numbers)
    what = str(claim.get("what") or "")
    if kind == "agreement":  # the claim is how far two values may lie apart
        limit = min(claimed, DISAGREEMENT_MAX)
        return Finding(kind, what, claimed, recomputed, limit, recomputed <= limit)
    limit = max(rule.absolute, rule.relative * abs(recomputed))
    return Finding(kind, what, claimed, recomputed, limit, abs(claimed - recomputed) <= limit)


def _throughput(n: Numbers) -> float:
    return n.one("items") / n.positive("seconds")


def _bandwidth(n: Numbers) -> float:
    return n.one("bytes") / n.positive("seconds")


def _ratio(n: Numbers) -> float:
    return n.one("of") / n.positive("over")


def _shares(n: Numbers) -> float:
    return math.fsum(n.several("parts"))


def _busy_share(n: Numbers) -> float:
    """A kernel with share k of all kernel time and share l of the latency: busy is l / k."""
    return n.one("latency_share") / n.positive("kernel_share")


def _pipeline_gain(n: Numbers) -> float:
    """Stages that run beside each other: the slowest sets the period, their sum does not."""
    after = max(n.several("after"))
    if after <= 0:
        raise ClaimError("a pipeline whose slowest stage takes no time cannot be compared")
    return max(n.several("before")) / after


def _per_pass(n: Numbers) -> float:
    """Calls of one pass; a witness kernel whose calls per pass are known counts the passes."""
    passes = n.one("passes") if n.has("passes") else None
    if n.has("witness_calls"):
        passes = n.one("witness_calls") / n.positive("witness_per_pass")
    if not passes or passes <= 0:
        raise ClaimError("per_pass needs numbers.passes, or witness_calls and witness_per_pass")
    return n.one("calls") / passes


def _product(n: Numbers) -> float:
    return math.prod(n.several("factors"))


def _disagreement(n: Numbers) -> float:
    first, second = n.positive("first"), n.positive("second")
    return max(first, second) / min(first, second) - 1


def _shapes(n: Numbers) -> float:
    """One shape of duration, or two: a spread this wide leaves nothing between min and max.

    The variance of values in [min, max] is at most (max - mean)(mean - min), reached only when all
    of them lie at the ends (Bhatia and Davis, Amer. Math. Monthly 107, 2000).
    """
    low, high, mean = n.one("min"), n.one("max"), n.one("mean")
    if not low <= mean <= high:
        raise ClaimError(f"mean {mean:g} lies outside [{low:g}, {high:g}]")
    widest = math.sqrt((high - mean) * (mean - low))
    return 2.0 if widest > 0 and n.one("std") >= TWO_SHAPES * widest else 1.0


#: Relative tolerances: what printed digits lose. ``absolute`` is in the unit of the claim.
RULES: Final[dict[str, Rule]] = {
    "throughput": Rule(("items", "seconds"), _throughput, 0.05),
    "bandwidth": Rule(("bytes", "seconds"), _bandwidth, 0.05),
    "ratio": Rule(("of", "over"), _ratio),
    "shares": Rule(("parts",), _shares, 0.0, 0.02, "a part is missing or counted twice"),
    "busy_share": Rule(
        ("latency_share", "kernel_share"),
        _busy_share,
        0.05,
        remedy="a device is busy for latency share / kernel share of the time",
    ),
    "pipeline_gain": Rule(
        ("before", "after"),
        _pipeline_gain,
        remedy="stages that overlap cost their maximum, not their sum",
    ),
    "per_pass": Rule(
        ("calls",), _per_pass, remedy="divide by the passes recorded, warm-up passes included"
    ),
    "product": Rule(("factors",), _product, remedy="multiply its factors again"),
    "agreement": Rule(("first", "second"), _disagreement),
    "shapes": Rule(
        ("min", "max", "mean", "std"),
        _shapes,
        0.0,
        remedy="the spread is that of two launch shapes: report each by itself",
    ),
}


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ClaimError(f"{where} is {value!r}, expected a number")
    return float(value)
