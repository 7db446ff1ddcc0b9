"""Judgement of one fault: its outcome, and whether robot and ledgers are as they must be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from drill.scene import Scene

from ppstream.core.clock import NS_PER_S

NOT_STARTED: Final = "there was no run to inject it into: "
COLUMNS: Final = (
    "fault",
    "noticed s",
    "gone s",
    "safe s",
    "moves s",
    "oldest ms",
    "truly ms",
    "codes",
    "ledger",
)
SHOWN: Final = 1500  # characters of a miss: its end, where ranks say why they ended
OLDEST_MS: Final = 300.0  # the drill's lease: no older action may be executed
LIE_MS: Final = 5.0  # half a sample: truth and claim begin at the same one
ORPHAN_S: Final = 5.0  # a robot that a rank started leaves by itself within this


@dataclass
class FaultOutcome:
    """One fault, as it went; times in seconds from the injection, None where they do not apply."""

    name: str
    ids: str
    does: str
    expected: str
    seen: str = ""
    notice_s: float | None = None
    gone_s: float | None = None
    safe_s: float | None = None
    moves_s: float | None = None
    oldest_ms: float | None = None  # as the actions claim
    true_ms: float | None = None
    codes: tuple[int | None, ...] = ()
    ledger: str = ""
    orphans: str = ""  # empty: the run goes on
    missed: str = ""  # why it did not meet what was expected


def judge_robot(scene: Scene, outcome: FaultOutcome, at_ns: int, *, must_hold: bool) -> None:
    """When it held for the first time, and how old the actions were that it executed."""
    ticks = scene.ticks(at_ns)
    held_ns = next((tick.at_ns for tick in ticks if not tick.moved), None)
    moved = [tick for tick in ticks if tick.moved]
    outcome.oldest_ms = max((tick.age_ms for tick in moved), default=None)
    outcome.true_ms = max((tick.true_ms for tick in moved), default=None)
    if must_hold and held_ns is None:
        outcome.missed = outcome.missed or "the robot never held"
    if held_ns is not None:
        outcome.safe_s = (held_ns - at_ns) / NS_PER_S
    if (outcome.oldest_ms or 0.0) > OLDEST_MS:
        outcome.missed = (
            outcome.missed or f"an action of age {outcome.oldest_ms:.0f} ms was executed"
        )
    lies = [tick for tick in moved if abs(tick.true_ms - tick.age_ms) > LIE_MS]
    if lies:
        worst = max(lies, key=lambda tick: tick.true_ms)
        outcome.missed = outcome.missed or (
            f"{len(lies)} actions were computed from other samples than they claim: one of "
            f"{worst.age_ms:.0f} ms from samples of {worst.true_ms:.0f} ms"
        )


def judge_ledger(outcome: FaultOutcome, imbalance: str) -> None:
    """``imbalance``: what the logs of both ranks do not account for."""
    outcome.ledger = imbalance or "balances"
    if imbalance:
        outcome.missed = outcome.missed or f"ledger: {imbalance}"


def table(outcomes: Sequence[FaultOutcome]) -> str:
    """Markdown, a row for each fault; what does not apply is left empty."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for one in outcomes:
        times = (one.notice_s, one.gone_s, one.safe_s, one.moves_s)
        cells = ["" if time is None else f"{time:.2f}" for time in times]
        oldest = ["" if ms is None else f"{ms:.0f}" for ms in (one.oldest_ms, one.true_ms)]
        codes = ", ".join(str(code) for code in one.codes)
        ledger = one.ledger if not one.missed else f"MISSED: {one.missed.splitlines()[0]}"
        row = (f"`{one.name}`", *cells, *oldest, codes, ledger)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def merged(text: str, outcomes: Sequence[FaultOutcome]) -> str:
    """A page's text with its table's rows of these faults replaced, and rows of new ones added.

    A page without the table becomes the table.
    """
    head, *rows = table(outcomes).splitlines(keepends=True)
    if head not in text:
        return head + "".join(rows)
    found = {row.split("`")[1]: row for row in rows[1:]}
    lines = [
        found.pop(line.split("`")[1], line) if line.startswith("| `") else line
        for line in text.splitlines(keepends=True)
    ]
    end = max(at for at, line in enumerate(lines) if line.startswith("|"))
    lines[end + 1 : end + 1] = found.values()
    return "".join(lines)


def print_outcome(outcome: FaultOutcome) -> None:
    """One line now, and below it what was seen."""
    times = (
        ("noticed", outcome.notice_s),
        ("gone", outcome.gone_s),
        ("safe", outcome.safe_s),
        ("moves", outcome.moves_s),
    )
    shown = "  ".join(f"{word} {value:.2f} s" for word, value in times if value is not None)
    oldest = "" if outcome.oldest_ms is None else f"  oldest action {outcome.oldest_ms:.0f} ms"
    oldest += "" if outcome.true_ms is None else f", truly {outcome.true_ms:.0f} ms"
    codes = "" if not outcome.codes else f"  codes {outcome.codes}"
    verdict = "MISSED" if outcome.missed else "ok    "
    ledger = f"  ledger {outcome.ledger}" if outcome.ledger else ""
    orphans = f"  orphans {outcome.orphans}" if outcome.orphans else ""
    print(f"{verdict} {outcome.name:29} {shown}{oldest}{codes}{ledger}{orphans}")
    print(f"       {outcome.does}; expected {outcome.expected}; seen: {outcome.seen[:160]}")
    if outcome.missed:
        start = NOT_STARTED if outcome.missed.startswith(NOT_STARTED) else ""
        print(f"       missed: {start}{outcome.missed[len(start) :][-SHOWN:]}")
    sys.stdout.flush()
