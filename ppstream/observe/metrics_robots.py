"""Prometheus families of the robots on rank 0, from ``Sessions.statistics()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppstream.observe import metric_families as show

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ppstream.sessions.session import SessionStatistics


def robot_families(said: SessionStatistics) -> Iterator[Metric]:
    """Sessions, frames and chunks; what was dropped stands in ``ppstream_dropped_total``."""
    yield show.gauge("ppstream_robots", "Robots with a session.", said.open)
    yield show.counter("ppstream_sessions_opened", "Sessions that began.", said.opened)
    yield show.counters(
        "ppstream_sessions_closed", "Sessions that ended, by reason.", "reason", said.closed
    )
    yield show.counters(
        "ppstream_sessions_refused", "Hellos refused, by reason.", "reason", said.refused
    )
    yield show.counters(
        "ppstream_connections_refused",
        "What never came to speak, by reason.",
        "reason",
        said.connections_refused,
    )
    yield show.counter("ppstream_frames_received", "Frames from robots.", said.frames_received)
    yield show.counter("ppstream_episodes_reset", "Episodes that robots began.", said.resets)
    yield show.counter("ppstream_chunks_sent", "Action chunks sent.", said.chunks_sent)
