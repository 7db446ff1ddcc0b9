"""What the drill reads of logs that are still written, and whether their ledgers balance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

SHOWN: Final = 3
IN_FLIGHT_MAX: Final = 8  # answered, and perhaps not in rank 0's log yet

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


def imbalance(front: Sequence[Line], back: Sequence[Line]) -> str:
    """What rank 0's ledgers and both ranks' envelopes do not account for; empty: they balance."""
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
        if unknown := set(answered) - known - set(answered[-IN_FLIGHT_MAX:]):
            wrong.append(f"answered, but not in rank 0's log: {sorted(unknown)[:SHOWN]}")
    return "; ".join(wrong[:SHOWN])


def _balances(entry: Line) -> bool:
    owed = entry["received"] - entry["used"] - entry["in_flight"]
    return bool(owed == sum(entry["dropped"].values()))
