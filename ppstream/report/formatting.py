"""Numbers and differences in words, the same in the terminal and on the page. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Final

from ppstream.analysis.records import RobotRequests
from ppstream.analysis.robot_states import RobotAccount
from ppstream.analysis.run_report import RunReport
from ppstream.analysis.scores import between
from ppstream.core.errors import counted
from ppstream.core.quantiles import Quantiles

APART: Final = 0.05  # scores nearer than this say the same
LONG_WAIT: Final = 0.10  # of the published stage 0
RARE: Final = 0.005  # a share that rounds to nothing is not shown


def ms(value_ns: float) -> str:
    """Three significant digits, never fewer than the milliseconds themselves."""
    value = value_ns / 1e6
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{_unsigned_zero(value, digits):.{digits}f} ms"


def percent(share: float, digits: int = 0, *, signed: bool = False) -> str:
    """A share for people; what rounds to nothing has no sign."""
    value = _unsigned_zero(100 * share, digits)
    return f"{value:{'+' if signed and value else ''}.{digits}f}%"


def _unsigned_zero(value: float, digits: int) -> float:
    """``value`` rounded, where nothing is ``0`` and never ``-0``."""
    return round(value, digits) + 0.0


def quantile_texts(found: Quantiles) -> dict[str, str]:
    """Each quantile that a report shows, by its name."""
    p99_ns = found.reported_p99_ns
    return {
        "p50": ms(found.p50_ns),
        "p95": ms(found.p95_ns),
        "p99": "NA" if p99_ns is None else ms(p99_ns),
        "max": ms(found.max_ns),
    }


def robot_texts(robot: RobotAccount) -> Iterator[str]:
    """Yields a robot's own account; what it did not say is left out."""
    if robot.holds is not None:
        says_none = robot.held_ns is None or robot.holds == robot.held_ns == 0
        held = "" if says_none else f" for {ms(robot.held_ns or 0)}"
        yield counted(robot.holds, "hold") + held
    if robot.faults is not None:
        newest = f", the newest: {robot.fault}" if robot.fault else ""
        yield counted(robot.faults, "fault") + newest
    if robot.chunk_gap_ns is not None:
        yield f"longest without a new chunk {ms(robot.chunk_gap_ns)}"


def error_text(row: RobotRequests) -> str:
    """Requests without actions, by reason; those that nobody answered are the last."""
    parts = [f"{n} {reason}" for reason, n in row.errors.items()]
    parts += [f"{row.unanswered} unanswered"] if row.unanswered else []
    return ", ".join(parts) or "none"


def imbalance_text(row: RobotRequests) -> str:
    """The ledger of a row that does not balance."""
    errors = sum(row.errors.values())
    return f"{row.answered} answered + {errors} errors + {row.unanswered} unanswered"


def gib(size: float) -> str:
    """Bytes for people."""
    value = size / (1 << 30)
    digits = 1 if abs(value) >= 10 else 2
    return f"{_unsigned_zero(value, digits):.{digits}f} GiB"


def size_text(count: int) -> str:
    """``count`` bytes for people, in powers of 1024."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def why_scores_differ(report: RunReport) -> str:
    """One sentence where the published and the primary score are apart, else nothing."""
    found, score = report.compat, report.primary
    if found is None or score is None or found.score is None or score.s is None:
        return ""
    if abs(found.score - score.s) <= APART:
        return ""
    begin = f"the published score {found.score:.2f} is not the primary {score.s:.2f}: "
    emitted = report.window.emitted
    waited_ns = fmean(between(e.tRecv, e.tDecode) for e in emitted)
    if found.score > score.s and _waits_for_input(report):
        return (
            begin
            + "the policy rank waits for input inside the published stages, and that hides nothing"
        )
    if waited_ns > LONG_WAIT * found.stage0_ns:
        return begin + (
            f"results waited {ms(waited_ns)} for their decode, which it counts as work of stage 0"
        )
    if report.window.topology.threads == "split":
        return begin + "it adds A and C, which here run beside each other on two threads"
    if found.period_ns < score.period_ns:
        return begin + (
            f"it takes the median period {ms(found.period_ns)}, and the mean {ms(score.period_ns)} "
            "holds the rare long ones, too"
        )
    return begin + "it takes medians of single envelopes, the primary sums over the window"


def _waits_for_input(report: RunReport) -> bool:
    return "INPUT_LIMITED" in report.reasons
