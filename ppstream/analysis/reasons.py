"""Each reason against a run: how its sentence begins, why, and what to do first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ppstream.analysis.verdict import ACCEPTABLE

#: Reasons that a busy machine gives.
SLOWED: Final = frozenset(
    {"CONTENDED", "DROPPED", "EXPIRED", "LOW_OVERLAP", "NOTHING_TO_HIDE", "NOT_WARM"}
    | {"SERVICE_DROPPED", "SERVICE_HELD", "SERVICE_LATE", "SERVICE_SLOWER", "SHORT_LEASE"}
    | {"TOO_FEW", "UNNAMED_TIME"}
)
#: Reasons that the failure of a rank before service explains.
CUT_SHORT: Final = frozenset(
    {"DROPPED", "EXPIRED", "INLINE", "MISSING_LOGS", "NOT_AUDITED", "NOT_WARM", "TOO_FEW"}
)
#: Reasons on the gain of ranks that work at the same time: robots may be served all the same.
OF_SPEED: Final = frozenset({"INLINE", *ACCEPTABLE})

#: By kind of reason: the begin of the sentence.
SAFETY: Final = "Do not drive a robot with this pipeline"
SCORE: Final = "This pipeline may not drive a robot yet"
RELEASE: Final = "This pipeline may drive a robot, but is not fit for a release"
UNKNOWN: Final = "Nobody can tell yet whether this pipeline may drive a robot"
SERVICE: Final = "Look at this run before you drive a robot again"
REPORT_IT: Final = "keep the log folder and report this fault"

#: Each reason: how the sentence begins, why, and what to do first.
REASONS: Final[Mapping[str, tuple[str, str, str]]] = {
    "QUEUE_BOUND": (SAFETY, "a queue held more than its bound", REPORT_IT),
    "STALE_EMIT": (SAFETY, "it sent actions of an epoch that had ended", REPORT_IT),
    "ORDER": (SAFETY, "it sent actions out of order or twice", REPORT_IT),
    "EXPIRED_EMIT": (
        SAFETY,
        "it sent actions behind their lease",
        "lower the latency, or lengthen actions.lease_ms",
    ),
    "CONTRADICTED": (
        UNKNOWN,
        "the folder says otherwise than its own lines",
        "judge the folder as the run left it",
    ),
    "INLINE": (
        "This pipeline runs in one process, and no gate has judged it",
        "all stages run in turn",
        "start two ranks if that is too slow: they prove their overlap before a robot may move",
    ),
    "MISSING_LOGS": (
        UNKNOWN,
        "the log lacks what a proof needs",
        "see in the report what is missing, and whether a disk was full",
    ),
    "EXPIRED": (
        UNKNOWN,
        "too many chunks were older than their lease when they were ready",
        "shorten the slowest stage, or lengthen actions.lease_ms",
    ),
    "DROPPED": (UNKNOWN, "too many envelopes were dropped", "see in the report for which reason"),
    "BAD_INSTRUMENT": (
        UNKNOWN,
        "the log contradicts itself",
        "correct the stamps that the failed audit names",
    ),
    "NOT_AUDITED": (
        UNKNOWN,
        "parts of the log could not be checked",
        "see in the report what is missing",
    ),
    "PERTURBED": (
        UNKNOWN,
        "a fault or a profiler disturbed what was measured",
        "mend the first fault that the report names, or end the profiler",
    ),
    "TOO_FEW": (
        UNKNOWN,
        "too few chunks were measured",
        "let it run longer",
    ),
    "NOT_WARM": (
        UNKNOWN,
        "its period never became steady",
        "look for compiles, throttling or another program",
    ),
    "INPUT_LIMITED": (
        UNKNOWN,
        "it waited for sensors, so its own limit was not measured",
        "batch the samples at the robot",
    ),
    "OUTPUT_LIMITED": (
        UNKNOWN,
        "it waited for whoever takes the actions",
        "let that take the newest chunk alone",
    ),
    "UNNAMED_TIME": (
        UNKNOWN,
        "a thread works outside the measured stages",
        "find the source, hook or callback that blocks it",
    ),
    "NOTHING_TO_HIDE": (
        UNKNOWN,
        "one stage does nearly all the work, so a second rank gains next to nothing",
        "run one rank, or cut the policy",
    ),
    "SHORT_LEASE": (SCORE, "robots would hold", "lengthen actions.lease_ms"),
    "LOW_OVERLAP": (
        SCORE,
        "its ranks work too little at the same time",
        "see in the report what holds them up",
    ),
    "CONTENDED": (
        SCORE,
        "its stages slow each other down",
        "give each a CPU, a lock and a device of its own",
    ),
    "LOW_EFFICIENCY": (
        RELEASE,
        "its busiest rank idles too long",
        "see in the report what it waits for",
    ),
    "OVER_MODEL": (
        RELEASE,
        "time is lost outside the stages",
        "see in the report what starts wait for",
    ),
    "PERIOD_BUDGET": (RELEASE, "its chunks come too seldom", "shorten the stage that limits it"),
    "LATENCY_BUDGET": (RELEASE, "its actions come too late", "shorten the stages, or lower D_in"),
    "SERVICE_ENDED": (SERVICE, "", "do what runbooks/exit-codes.md says of that code"),
    "SERVICE_SLOWER": (SERVICE, "", "find what the service does and bring-up does not"),
    "SERVICE_HELD": (SERVICE, "", "see in the report how long it had no new chunk, and why"),
    "SERVICE_DROPPED": (SERVICE, "", "remove the reason that most of them name"),
    "SERVICE_LATE": (SERVICE, "", "see in runbooks/stale-actions.md what makes them late"),
    "SERVICE_UNSERVED": (
        SERVICE,
        "",
        "see that the robot sends every stream, stamped by one clock",
    ),
    "SERVICE_UNEXECUTED": (
        SERVICE,
        "",
        "see why it holds; one that plays chunks itself tells RobotClient.executed",
    ),
    "SERVICE_TOO_OLD": (SERVICE, "", "have that robot drop actions by its clock before it acts"),
}
