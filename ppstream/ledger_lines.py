"""What rank 0 writes into its log beside envelopes: robots' reports, and the ledger each second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ppstream.intake import balances

if TYPE_CHECKING:
    from collections import deque

    from ppstream.messages import Report
    from ppstream.rank0 import Rank0
    from ppstream.timestamps import TimestampLog


def write_reports(log: TimestampLog, reports: deque[Report]) -> None:
    """What robots measured of the chunks they executed, in their own clocks."""
    while reports:
        log.line("robot", **msgspec.structs.asdict(reports.popleft()))


def write_ledger(rank0: Rank0) -> None:
    """One ledger line: samples by stream, and envelopes."""
    rank0.log.line(
        "ledger",
        streams=balances(rank0.intake.rows),
        envelopes={
            "received": rank0.started,
            "used": rank0.stage_c.emitted,
            "dropped": dict(rank0.stage_c.dropped),
            "in_flight": rank0.started - rank0.finished,
        },
    )
