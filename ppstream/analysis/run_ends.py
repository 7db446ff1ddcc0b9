"""Ends of a run: the ranks' own, from ``exit.json``, and starts behind them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from ppstream.analysis.audits import EPS, lines_lost
from ppstream.analysis.json_values import mapping_of
from ppstream.analysis.records import RunLog
from ppstream.analysis.run_statistics import shown
from ppstream.analysis.segments import JudgedSpan
from ppstream.core.errors import OTHER_LEFT, ExitCode, counted, printable
from ppstream.core.phases import BRING_UP, ENDING, SERVING

#: No failures of a rank: the verdict itself tells of those of the gate.
AS_ASKED: Final = (ExitCode.DRAINED, ExitCode.GATE_FAIL, ExitCode.GATE_INCONCLUSIVE)
REASON_CHARS: Final = 1000


def failed_end(run: RunLog) -> str:
    """The rank that failed first in the newest generation, and how; empty: none did.

    A rank that left because of another is named only where no other is known to have failed.
    """
    known = {rank: end for rank, end in run.exits.items() if isinstance(end, Mapping)}
    ends = {rank: end for rank, end in known.items() if isinstance(end.get("code"), int)}
    newest = run.newest_generation
    starts = {rank: _generation(end, newest) for rank, end in ends.items()}
    newest = max([newest, *starts.values()])
    failed = [r for r, end in ends.items() if starts[r] == newest and end["code"] not in AS_ASKED]
    if not failed:
        return ""
    rank = min(failed, key=lambda rank: _by_another(ends[rank]))  # the first of equals
    code, name, reason = (shown(ends[rank].get(field)) for field in ("code", "name", "reason"))
    return f"rank {shown(rank)} ended with {code} {name}: {reason}"


def refused_alone(run: RunLog) -> str:
    """Returns why one rank by itself, which no gate judges, was refused; empty: it was not.

    Of several ranks the gate's verdict tells it.
    """
    end = _end(run, 0)
    if run.topology.world_size > 1 or end.get("code") != ExitCode.GATE_FAIL:
        return ""
    return printable(str(end.get("reason") or ""), REASON_CHARS, " ")


def lost_end(run: RunLog) -> str:
    """A service whose log stops before the run did; empty: it has its end, or the run goes on."""
    told = [e for e in run.events if e.rank == 0 and e.phase is not None]
    newest = max((e.generation for e in told), default=0)
    phases = {e.phase for e in told if e.generation == newest}
    if SERVING.isdisjoint(phases) or not ENDING.isdisjoint(phases):
        return ""
    end, lacks = _end(run, 0), "the log has no end of the service (phase draining)"
    if run.finished and end.get("code", run.manifest.get("exit_code")) == ExitCode.DRAINED:
        return f"{lacks}, which the run came to"
    if run.finished and "code" not in end:
        return f"{lacks}, and rank 0 left no exit record"
    if run.torn_lines and not run.finished:
        return "the log stops in the middle of a line: its disk was full, or the run was killed"
    return ""


def lost_lines(run: RunLog) -> str:
    """Lines of the newest service that its log lacks by its last ledger; empty: few or none.

    Of a start without an end, those of the envelopes last under way may be unwritten.
    """
    served = {e.generation for e in run.envelopes if e.phase in SERVING}
    served |= {e.generation for e in run.events if e.rank == 0 and e.phase in SERVING}
    newest = max(served, default=-1)
    books = [book for book in run.envelope_ledgers if book.generation == newest]
    if not books or books[-1].imbalance:
        return ""
    has_ended = run.finished and newest == run.envelope_ledgers[-1].generation
    lines = [e for e in run.envelopes if e.generation == newest]
    ready = [e for e in lines if e.phase in SERVING]
    unwritten = 0 if has_ended else run.topology.in_system
    missing, share = lines_lost(lines, ready, books[-1], unwritten)
    return f"{missing} lines of envelopes are missing in service" if share > EPS else ""


def end_sentences(run: RunLog, window: JudgedSpan) -> Iterator[str]:
    """Yields what the log tells of starts and ends; of service a reason of the verdict tells it."""
    generations = sorted({e.generation for e in run.envelopes})
    if len(generations) > 1:
        yield (
            f"{len(generations)} generations: the run was restarted; generation "
            f"{window.generation} is judged"
        )
    has_served = any(e.phase in SERVING for e in run.envelopes)
    failed = failed_end(run)
    if has_served and not run.finished and not failed:
        yield "run.json has no end of this run: it runs on, was killed, or its disk was full"
    if not has_served and failed:
        yield failed
    elif phase := last_before_ready(run):
        newest = max(e.generation for e in run.events)
        counts = Counter(e.phase for e in run.envelopes if e.generation == newest)
        through = " and ".join(
            f"{counted(n, 'envelope')} of {shown(name)}" for name, n in counts.items()
        )
        how = "is, or was killed," if not run.finished else "was stopped"
        why = f" ({shown(_end(run, 0).get('reason'))})" if run.finished else ""
        yield f"the run {how} in {phase}{why}, before it was ready: {through or '0 envelopes'}"


def last_before_ready(run: RunLog) -> str:
    """The phase in which the newest start was stopped, or stands, before it was ready.

    Empty: it was ready, or the gate judged it; or nothing tells of phases, or attribution was on.
    """
    told = [e for e in run.events if e.rank == 0 and e.name == "phase" and e.phase is not None]
    newest = max((e.generation for e in run.events), default=0)
    phases = [e.phase for e in told if e.generation == newest]
    way = [phase for phase in phases if phase not in ENDING]
    if not way or not SERVING.isdisjoint(phases) or run.config.get("mode") == "attribution":
        return ""
    was_stopped = _end(run, 0).get("code") == ExitCode.DRAINED
    return str(way[-1]) if way[-1] != BRING_UP or was_stopped else ""


def more_envelopes(window: JudgedSpan, unready: str) -> str:
    """Returns how to get the envelopes that ``TOO_FEW`` lacks, as an order.

    ``unready``: as ``last_before_ready``.
    """
    if unready:
        return "let it run until it is ready"
    return "raise bringup.envelopes" if window.phases == {BRING_UP} else "let it run longer"


def _end(run: RunLog, rank: int) -> Mapping[str, object]:
    return mapping_of(run.exits.get(str(rank)))


def _generation(end: Mapping[str, object], newest: int) -> int:
    """The start that ended so; older logs do not tell."""
    found = end.get("generation")
    return found if isinstance(found, int) else newest


def _by_another(end: Mapping[str, object]) -> tuple[bool, bool]:
    """Sorts behind a failure of its own who lost a rank, and behind that who was told of it."""
    return str(end.get("reason")).startswith(OTHER_LEFT), end["code"] == ExitCode.PEER_LOST
