"""SampleLedger: what became of every sample, so that none is lost without a reason.

``received = used + dropped by reason + in_flight``, exactly, at every moment between two calls.
A sample is *used* once a window's targets reached it, *in flight* while it waits in a ring for
that, and otherwise dropped with its reason. Envelopes have a ledger of their own, not here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypedDict

from ppstream import native

# Refused on arrival:
SHAPE: Final = "shape"  # a message whose arrays are not what the stream declared
NON_FINITE: Final = "non_finite"  # NaN, infinite, or too large for float32
DUPLICATE: Final = "duplicate"  # the newest sample's stamp again: the first one counts
LATE: Final = "late"  # older than the newest sample
FUTURE: Final = "future"  # further ahead than time can have passed
RATE: Final = "rate"  # beyond what a robot may send of the stream in a second
STALE: Final = "stale"  # it waited on the way for longer than any window reaches back
# Accepted, but in no window:
PASSED_OVER: Final = "passed_over"  # older than all that the first window since then needed
OVERWRITTEN: Final = "overwritten"  # the ring was full before a window was cut
CLOCK_JUMP: Final = "clock_jump"  # the robot's clock started anew
NEW_EPISODE: Final = "new_episode"  # the robot asked to forget
CLOSED: Final = "closed"  # the robot left


class Balance(TypedDict):
    """A ledger as the log carries it."""

    received: int
    used: int
    dropped: dict[str, int]
    in_flight: int


class SampleLedger(native.Ledger):
    """Counts of one row and stream; written by the thread that owns the ring, and by it alone.

    Holes between samples taken in, wider than a window bridges, are counted beside the balance.
    """

    def __init__(self) -> None:
        self.received = 0
        self.used = 0
        self.in_flight = 0
        self.dropped: dict[str, int] = {}
        self.holes = 0
        self.longest_hole_ns = 0

    def reject(self, reason: str, samples: int) -> None:
        """``samples`` that were received are not accepted."""
        self.dropped[reason] = self.dropped.get(reason, 0) + samples

    def drop(self, reason: str, samples: int) -> None:
        """``samples`` in flight will never be used."""
        self.in_flight -= samples
        self.reject(reason, samples)

    def add_holes(self, holes: int, longest_ns: int) -> None:
        """So many times without a sample for more than ``max_gap_ms``."""
        self.holes += holes
        self.longest_hole_ns = max(self.longest_hole_ns, longest_ns)

    def account_used(self, used: int, passed_over: int) -> None:
        """A window was cut: these samples are in flight no more."""
        self.in_flight -= used
        self.used += used
        if passed_over:
            self.drop(PASSED_OVER, passed_over)

    def check(self) -> None:
        """Raises AssertionError with all numbers unless the ledger balances."""
        accounted = self.used + sum(self.dropped.values()) + self.in_flight
        assert self.received == accounted, f"{self.received - accounted} samples lost: {self}"
        assert min(self.used, self.in_flight, *self.dropped.values(), 0) == 0, f"negative: {self}"

    def as_dict(self) -> Balance:
        """A copy in the log's form."""
        return {
            "received": self.received,
            "used": self.used,
            "dropped": dict(self.dropped),
            "in_flight": self.in_flight,
        }

    def __repr__(self) -> str:
        return f"SampleLedger({self.as_dict()})"


def total(ledgers: Iterable[SampleLedger]) -> SampleLedger:
    """A new ledger with the sums: of one stream over all rows, or of everything."""
    whole = SampleLedger()
    for ledger in ledgers:
        whole.received += ledger.received
        whole.used += ledger.used
        whole.in_flight += ledger.in_flight
        whole.holes += ledger.holes
        whole.longest_hole_ns = max(whole.longest_hole_ns, ledger.longest_hole_ns)
        for reason, samples in ledger.dropped.items():
            whole.reject(reason, samples)
    return whole
