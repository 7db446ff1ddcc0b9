"""Directory: what each pipeline last said of itself, and which one a robot is to speak to.

Pure: no socket, no clock, no Ray. It learns everything from reports, so one that begins anew knows
all of it a report later; a robot that is served never needs it.

A robot stays with its pipeline while that serves; else it gets the one with the most free rows. A
row that was promised is kept for ``TTL_NS``: several robots that ask at once do not all get the
last one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

import msgspec

from ppstream.core.clock import NS_PER_S
from ppstream.core.phases import SERVING
from ppstream.wire.directory_messages import Resolved, Unresolved

SILENT_NS: Final = 2 * NS_PER_S  # a pipeline that has reported nothing for longer serves nobody
TTL_NS: Final = 3 * NS_PER_S
ROBOTS_MAX: Final = 100_000  # whose pipeline is remembered
UNKNOWN: Final = "silent"  # phase of a pipeline that does not report


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline's state, from the ``/readyz`` and metrics of its rank 0."""

    pipeline: str
    phase: str  # of the run; ``starting`` before it tells, ``ended`` or ``failed`` behind it
    endpoint: str
    server_key: str | None = None
    rows: int
    robots: int = 0  # with a session
    node: str = ""
    pid: int = 0  # of its launcher
    exit: str = ""  # how it ended, behind its end
    weights: str = ""  # digest of its policy.weights; empty: it has none, or has not read it yet


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline as status shows it."""

    report: PipelineReport
    phase: str  # as reported, or ``silent``
    free: int  # rows that a robot could get now
    is_draining: bool
    age_s: float  # of the report
    starts: int  # of its launcher, as far as the directory has seen them
    last_exit: str  # of the newest end that was reported


class _Promise(msgspec.Struct, frozen=True):
    pipeline: str
    until_ns: int


class Directory:
    """Pipelines and promises; one thread at a time."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[PipelineReport, int]] = {}
        self._draining: set[str] = set()
        self._starts: Counter[str] = Counter()
        self._exits: dict[str, str] = {}
        self._before: OrderedDict[str, str] = OrderedDict()  # pipeline by robot, oldest first
        self._promises: OrderedDict[str, _Promise] = OrderedDict()  # not yet kept, by robot
        self.resolved = 0
        self.unresolved = 0

    def report(self, report: PipelineReport, now_ns: int) -> None:
        """Takes what a pipeline says of itself; robots that have come had promises."""
        before, _ = self._reports.get(report.pipeline, (None, 0))
        self._reports[report.pipeline] = report, now_ns
        self._starts[report.pipeline] += before is None or before.pid != report.pid
        if report.exit:
            self._exits[report.pipeline] = report.exit
        came = report.robots - (0 if before is None else before.robots)
        own = [robot for robot, one in self._promises.items() if one.pipeline == report.pipeline]
        for robot in own[: max(0, came)]:
            del self._promises[robot]

    def forget(self, pipeline: str) -> None:
        """The pipeline is taken down for good."""
        self._reports.pop(pipeline, None)
        self._draining.discard(pipeline)

    def drain(self, pipeline: str) -> bool:
        """No robot gets this pipeline from now on; False: it is not known."""
        if pipeline not in self._reports:
            return False
        self._draining.add(pipeline)
        return True

    def resolve(self, robot: str, avoid: str, now_ns: int) -> Resolved | Unresolved:
        """A pipeline for ``robot``.

        Args:
            robot: its name.
            avoid: the pipeline that does not serve it, named only where no other has a row.
            now_ns: by the clock of ``report``.
        """
        known = self._before.get(robot, "")
        self._promises.pop(robot, None)
        free = self._all_free(now_ns)
        if known in free:
            free[known] += 1  # its own row may be the last one
        usable = [name for name, rows in free.items() if rows > 0]
        if not usable:
            self.unresolved += 1
            if free:
                return Unresolved("full", f"no row is free in {len(free)} pipelines that serve")
            return Unresolved("none_serves", f"none of {len(self._reports)} pipelines serves")
        others = [name for name in usable if name != avoid]
        if known in others:
            chosen = known
        else:
            chosen = min(others or usable, key=lambda name: (-free[name], name))
        self._promises[robot] = _Promise(chosen, now_ns + TTL_NS)
        self._before[robot] = chosen
        self._before.move_to_end(robot)
        if len(self._before) > ROBOTS_MAX:
            self._before.popitem(last=False)
        self.resolved += 1
        report, _ = self._reports[chosen]
        return Resolved(
            pipeline=chosen,
            endpoint=report.endpoint,
            server_key=report.server_key,
            ttl_s=TTL_NS / NS_PER_S,
        )

    def status(self, now_ns: int) -> list[PipelineStatus]:
        """Every pipeline, by name."""
        free = self._all_free(now_ns)
        return [
            PipelineStatus(
                report=report,
                phase=report.phase if now_ns - at_ns <= SILENT_NS else UNKNOWN,
                free=max(0, free.get(name, 0)),
                is_draining=name in self._draining,
                age_s=(now_ns - at_ns) / NS_PER_S,
                starts=self._starts[name],
                last_exit=self._exits.get(name, ""),
            )
            for name, (report, at_ns) in sorted(self._reports.items())
        ]

    def _all_free(self, now_ns: int) -> dict[str, int]:
        """Rows that are neither taken nor promised, of each pipeline that serves."""
        while self._promises and next(iter(self._promises.values())).until_ns <= now_ns:
            self._promises.popitem(last=False)
        promised = Counter(one.pipeline for one in self._promises.values())
        return {
            name: report.rows - report.robots - promised[name]
            for name, (report, at_ns) in self._reports.items()
            if report.phase in SERVING
            and now_ns - at_ns <= SILENT_NS
            and name not in self._draining
        }
