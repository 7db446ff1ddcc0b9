"""Flight: one envelope on its way through the pipeline, as rank 0 remembers it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ppstream.timestamps import EnvelopeRecord

if TYPE_CHECKING:
    from ppstream.ring import RowInput


class Owner(NamedTuple):
    """Whose row this is, in that robot's clock."""

    present: bool
    episode: tuple[int, int]  # session, session_epoch
    window_end_ns: int
    expires_ns: int
    received_ns: int = 0  # arrival of this row's newest reference sample; 0: as the envelope's


@dataclass(slots=True)
class Flight:
    """Identity and bookkeeping of one envelope, from stage A to emit or drop.

    ``index`` counts over the whole run (it names the slot); ``epoch`` and ``seq`` are its name in
    logs and on the robot's wire. ``received_ns`` is the arrival, at rank 0, of its newest sample.
    """

    index: int
    epoch: int
    seq: int
    record: EnvelopeRecord
    owners: list[Owner] = field(default_factory=list)
    received_ns: int = 0
    sent_ns: int = 0


def owners_of(rows: Iterable[RowInput], ends_ns: Sequence[int], lease_ns: int) -> list[Owner]:
    """Whose each row is as its window, which ends there, is cut; for the rings' own thread."""
    return [
        Owner(
            row.present,
            (row.session, row.session_epoch),
            end,
            end + lease_ns,
            row.reference.newest_rx_ns,
        )
        for row, end in zip(rows, ends_ns, strict=True)
    ]


def name_rows(flight: Flight) -> None:
    """Write the flight's owners into its record; one row stands alone, several as lists."""
    record, owners = flight.record, flight.owners
    if len(owners) == 1:
        owner = owners[0]
        record.session, record.session_epoch = owner.episode
        record.window_end_ns, record.expires_ns = owner.window_end_ns, owner.expires_ns
        return
    record.session = [owner.episode[0] for owner in owners]
    record.session_epoch = [owner.episode[1] for owner in owners]
    record.window_end_ns = [owner.window_end_ns for owner in owners]
    record.expires_ns = [owner.expires_ns for owner in owners]
