"""Stages by the device's clock beside the host's, and how well the two clocks were matched. Pure.

A host's interval holds more than the device's work: launches, waits for the device, Python. Where
a rank's stamps are events of its device, those of C among them, there is no second clock to compare
with, and none is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ppstream.analysis.places import lines_of
from ppstream.analysis.records import Envelope, RunLog
from ppstream.analysis.scores import between
from ppstream.analysis.segments import JudgedSpan
from ppstream.core.quantiles import Quantiles, quantiles

APART_MAX: Final = 0.10  # device and host further apart than this is worth a word


@dataclass(frozen=True, slots=True)
class StageOnDevice:
    """One stage; ``host`` is None where the device's events are the only stamps."""

    stage: str
    device: Quantiles
    host: Quantiles | None
    alone_ns: int | None  # timed in bring-up while nothing else ran

    @property
    def apart(self) -> float | None:
        """Share of the device's median by which the host's median is longer."""
        if self.host is None or not self.device.p50_ns:
            return None
        return self.host.p50_ns / self.device.p50_ns - 1

    @property
    def disagrees(self) -> bool:
        return self.apart is not None and abs(self.apart) > APART_MAX


@dataclass(frozen=True, slots=True)
class ClockSeen:
    """Quality of the mapping from device to host clock of one rank: the worst of its anchors."""

    rank: int
    renewals: int
    bracket_max_ns: int  # an anchor lies somewhere in it
    surprise_max_ns: int  # where an anchor was, against where the one before it put it
    drift_ppb: int  # the newest


def stages_on_device(run: RunLog, window: JudgedSpan) -> list[StageOnDevice]:
    """A, B (of a chain B1 to Bn) and C, those of them whose device durations are in the log."""
    return list(_stages(run, window))


def _stages(run: RunLog, window: JudgedSpan) -> Iterator[StageOnDevice]:
    emitted, alone = window.emitted, run.standalone
    host_0 = not _is_device_stamped(run, 0)
    taken = {
        "A": ([e.eA_ns for e in emitted], [between(e.tA0, e.tA1) for e in emitted if host_0]),
        **_stages_b(run, emitted),
        "C": (
            [e.eC_ns for e in emitted],
            [between(e.tDecode, e.tEmit) - (e.w_emit_ns or 0) for e in emitted if host_0],
        ),
    }
    times_alone = {"A": alone.a_ns, "B": alone.b_ns, "C": alone.c_ns} if alone else {}
    for place, alone_ns in enumerate(alone.places_ns if alone else (), start=1):
        times_alone[f"B{place}"] = alone_ns
    for stage, (device, host) in taken.items():
        found = quantiles([ns for ns in device if ns is not None])
        if found is not None:
            yield StageOnDevice(stage, found, quantiles(host), times_alone.get(stage))


def _stages_b(
    run: RunLog, emitted: Sequence[Envelope]
) -> dict[str, tuple[list[int | None], list[int]]]:
    """Device and host durations of stage B, of a chain by place."""
    topology = run.topology
    if not topology.is_chain:
        host = not _is_device_stamped(run, topology.world_size - 1)
        return {"B": ([e.eB_ns for e in emitted], [e.B_ns for e in emitted if host and e.B_ns])}
    found = {}
    for place in topology.ranks:
        lines, host = lines_of(emitted, place), not _is_device_stamped(run, place)
        times = [line.B_ns for line in lines if host and line.B_ns]
        found[f"B{place}"] = ([line.eB_ns for line in lines], times)
    return found


def _is_device_stamped(run: RunLog, rank: int) -> bool:
    topology = run.manifest.get("topology")
    ranks = topology.get("ranks") if isinstance(topology, dict) else None
    return any(
        isinstance(table, dict)
        and table.get("rank") == rank
        and table.get("stamp_source") == "device"
        for table in (ranks if isinstance(ranks, list) else [])
    )


def clocks_seen(run: RunLog) -> list[ClockSeen]:
    """Of every rank that mapped its device's clock, from its ``clock`` events."""
    by_rank: dict[int, list[tuple[int, int, int]]] = {}
    for event in run.events:
        if event.name == "clock":
            values = (event.fields.get(k) for k in ("bracket_ns", "surprise_ns", "drift_ppb"))
            bracket, surprise, drift = (n if isinstance(n, int) else 0 for n in values)
            by_rank.setdefault(event.rank, []).append((bracket, abs(surprise), drift))
    return [
        ClockSeen(rank, len(seen), max(s[0] for s in seen), max(s[1] for s in seen), seen[-1][2])
        for rank, seen in sorted(by_rank.items())
    ]
