"""What rank 0 writes into its log beside envelopes: robots' reports, and the ledger each second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ppstream.ingest.intake import stream_lines
from ppstream.wire.messages import Report

if TYPE_CHECKING:
    from collections import deque

    from ppstream.observe.log_writer import TimestampLog
    from ppstream.pipeline.rank0 import Rank0
    from ppstream.sessions.requests import Told


def write_reports(log: TimestampLog, reports: deque[Told]) -> None:
    """What robots measured of chunks, and how they fared (``robot_state``), in their own clocks."""
    while reports:
        told = reports.popleft()
        kind = "robot" if isinstance(told, Report) else "robot_state"
        log.line(kind, **msgspec.structs.asdict(told))


def write_ledger(rank0: Rank0) -> None:
    """One ledger line: samples by stream, and envelopes."""
    rank0.log.line(
        "ledger",
        streams=stream_lines(rank0.intake),
        envelopes={
            "received": rank0.started,
            "used": rank0.stage_c.emitted,
            "dropped": dict(rank0.stage_c.dropped),
            "in_flight": rank0.started - rank0.finished,
        },
    )
