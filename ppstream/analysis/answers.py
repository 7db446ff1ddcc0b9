"""Answers to envelopes: the policy ranks' lines beside those of rank 0. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final

from ppstream.analysis.line_columns import Lines
from ppstream.analysis.records import (
    Envelope,
    EnvelopeLine,
    PolicyAnswer,
    PolicyLine,
    Topology,
    header_words,
)

#: Both sides write these; rank 0's line wins, the policy rank's fills what it lacks.
_SHARED: Final = tuple(header_words(EnvelopeLine))
_Key = tuple[int, int, int, int]  # generation, lane, epoch, seq
_NO_LINE: Final = ((), None)


def joined(
    envelopes: Lines[Envelope], policies: Mapping[int, Lines[PolicyAnswer]], topology: Topology
) -> tuple[Envelope, ...]:
    """Rank 0's lines with those of the policy ranks, which fill fields that rank 0's lack."""
    rows = (*envelopes,)
    found = {rank: _matching(rows, lines) for rank, lines in policies.items()}
    places = [found.get(place, repeat(None)) for place in topology.ranks]
    if not topology.is_chain:
        ranks = zip(rows, *found.values(), strict=False)
        places = [(next(filter(None, lines), None) for _, *lines in ranks)]
    envelopes.refer("places", places)
    told = [name for name in _SHARED if any(lines.has(name) for lines in policies.values())]
    envelopes.fill(told, lambda e: _answers(e.places))
    return rows


def _matching(
    envelopes: Iterable[Envelope], lines: Iterable[PolicyAnswer]
) -> Iterator[PolicyAnswer | None]:
    """Yields for each envelope the first line of the same identity; both are in its order."""
    ordered = ((identity_of(line), line) for line in lines)
    identity, line = next(ordered, _NO_LINE)
    for e in envelopes:
        wanted = identity_of(e)
        while line is not None and identity < wanted:
            identity, line = next(ordered, _NO_LINE)
        yield line if identity == wanted else None


def _answers(lines: Sequence[PolicyLine | None]) -> dict[str, int | None]:
    """The fields of rank 0's line that the policy ranks' lines give, as rank 0 would log them.

    Of a chain: B of the slowest place, the residences' sum, and the waits of the last place.
    """
    last = lines[-1]
    found = {name: getattr(last, name) for name in _SHARED} if last is not None else {}
    if len(lines) > 1:
        known = [line for line in lines if line is not None and line.B_ns is not None]
        whole = len(known) == len(lines)
        slowest = max(known, key=lambda line: line.B_ns or 0, default=None)
        stays = [line.residence_ns for line in known if line.residence_ns is not None]
        found["B_ns"] = slowest.B_ns if whole and slowest else None
        found["eB_ns"] = slowest.eB_ns if whole and slowest else None
        found["residence_ns"] = sum(stays) if len(stays) == len(lines) else None
    return found


def identity_of(line: Envelope | PolicyLine) -> _Key:
    return line.generation, line.lane, line.epoch, line.seq


def order_of(envelope: Envelope) -> tuple[int, int, int, int, int]:
    return (*identity_of(envelope), envelope.tEmit or 0)
