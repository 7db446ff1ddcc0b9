"""Readers of logs that are still written, which check that their ledgers balance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

SHOWN: Final = 3
NOTHING_SENT: Final = "nothing was sent"
#: Newest envelopes that may be answered and not in rank 0's log: 8 that a GPU had queued, and, if
#: rank 0 was killed, what it had recorded in the 20 ms between two writes of its log.
TAIL_MAX: Final = 16

Line = dict[str, Any]


def whole_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    """The complete lines behind ``offset``, and where they end."""
    with path.open("rb") as file:
        file.seek(offset)
        whole, newline, _ = file.read().rpartition(b"\n")
    return whole.split(b"\n") if newline else [], offset + len(whole) + len(newline)


def parsed(line: bytes) -> Line:
    """One line of a log; of kind ``torn`` when a full disk cut it."""
    try:
        found: Line = json.loads(line)
    except ValueError:
        return {"kind": "torn"}
    return found


def imbalances(directory: Path) -> str:
    """As ``imbalance``, of each generation in a run's folder; ``NOTHING_SENT`` without envelopes.

    A rank of a generation may be missing: it left no log.
    """
    wrong, has_sent = [], False
    for path in sorted(directory.glob("rank0.gen*.jsonl")):
        other = directory / path.name.replace("rank0", "rank1")
        front, back = (_lines(log) for log in (path, other))
        kinds = {line["kind"] for line in front}
        has_sent = has_sent or "envelope" in kinds
        if "envelope" in kinds and "ledger" not in kinds:
            wrong.append(f"{path.name}: no ledger")
        if found := imbalance(front, back):
            wrong.append(f"{path.name}: {found}")
    return "; ".join(wrong) or ("" if has_sent else NOTHING_SENT)


def _lines(path: Path) -> list[Line]:
    return [parsed(line) for line in whole_lines(path, 0)[0]] if path.exists() else []


def imbalance(front: Sequence[Line], back: Sequence[Line]) -> str:
    """Words what rank 0's ledgers and both ranks' envelopes lack; empty: they balance."""
    wrong = []
    for line in front:
        if line["kind"] == "ledger":
            entries = {**line["streams"], "envelopes": line["envelopes"]}
            wrong += [f"{name}: {entry}" for name, entry in entries.items() if not _balances(entry)]
    answered = [(line["epoch"], line["seq"]) for line in back if line["kind"] == "stage1"]
    if len(answered) != len(set(answered)):
        wrong.append("an envelope was answered twice")
    if not any(line["kind"] == "torn" for line in front):  # else lines of envelopes are lost
        known = {(line["epoch"], line["seq"]) for line in front if line["kind"] == "envelope"}
        unknown = [envelope for envelope in answered if envelope not in known]
        if unknown != answered[len(answered) - len(unknown) :] or len(unknown) > TAIL_MAX:
            wrong.append(f"answered, but not in rank 0's log: {unknown[:SHOWN]}")
    return "; ".join(wrong[:SHOWN])


def _balances(entry: Line) -> bool:
    owed = entry["received"] - entry["used"] - entry["in_flight"]
    return bool(owed == sum(entry["dropped"].values()))
