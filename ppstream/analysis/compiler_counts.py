"""Counts of torch's compiler by part of the policy, from the ``compiler`` events of every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ppstream.analysis.records import RunLog


class CompiledPartSeen(NamedTuple):
    """A part that a rank compiled, as its newest event has it."""

    rank: int
    part: str
    graphs: int
    breaks: int  # places where the compiler gave up and ran Python
    recompiles: int  # of graphs that were there
    kernels: int  # 0: the compiler counted none


def compiled_parts_seen(run: RunLog) -> list[CompiledPartSeen]:
    """In order of ranks; empty where nothing is compiled."""
    found: dict[tuple[int, str], CompiledPartSeen] = {}
    for event in run.events:
        parts = event.fields.get("parts") if event.name == "compiler" else None
        for part, counts in parts.items() if isinstance(parts, dict) else ():
            if isinstance(counts, dict):
                values = (counts.get(name) for name in CompiledPartSeen._fields[2:])
                numbers = (value if isinstance(value, int) else 0 for value in values)
                found[event.rank, str(part)] = CompiledPartSeen(event.rank, str(part), *numbers)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]
