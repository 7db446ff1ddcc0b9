"""Flight: one envelope on its way through the pipeline, as rank 0 remembers it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ppstream.observe.log_writer import EnvelopeRecord

if TYPE_CHECKING:
    from ppstream.ingest.rows import RowInput


class Owner(NamedTuple):
    """Owner of a row, in that robot's clock."""

    present: bool
    episode: tuple[int, int]  # session, session_epoch
    window_end_ns: int
    expires_ns: int
    received_ns: int = 0  # arrival of this row's newest reference sample; 0: as the envelope's


class Flight(msgspec.Struct):
    """Identity and bookkeeping of one envelope, from stage A to emit or drop.

    ``index`` counts over the whole run (it names the slot); ``epoch`` and ``seq`` are its name in
    logs and on the robot's wire. ``received_ns`` is the arrival, at rank 0, of its newest sample,
    ``sent_ns`` when it was sent, or later its turn to be answered began, ``emit_ns`` the instant at
    which its lease was looked at, ``failed`` the header's word where a part of the policy raised in
    stage A on a GPU.
    """

    index: int
    epoch: int
    seq: int
    record: EnvelopeRecord
    owners: Sequence[Owner] = ()
    received_ns: int = 0
    sent_ns: int = 0
    emit_ns: int = 0
    failed: int = 0


def owners_of(rows: Iterable[RowInput], ends_ns: Sequence[int], lease_ns: int) -> list[Owner]:
    """Returns the owner of each row as its window is cut; for the rings' own thread."""
    return [
        Owner(
            row.present_at(end),
            (row.session, row.session_epoch),
            end,
            end + lease_ns,
            row.reference.newest_rx_ns,
        )
        for row, end in zip(rows, ends_ns, strict=True)
    ]


class RowNames(NamedTuple):
    """Owners as a record has them: one row stands alone, several as lists."""

    session: int | list[int]
    session_epoch: int | list[int]
    window_end_ns: int | list[int]
    expires_ns: int | list[int]


def names_of(owners: Sequence[Owner]) -> RowNames:
    if len(owners) == 1:
        owner = owners[0]
        return RowNames(*owner.episode, owner.window_end_ns, owner.expires_ns)
    return RowNames(
        [owner.episode[0] for owner in owners],
        [owner.episode[1] for owner in owners],
        [owner.window_end_ns for owner in owners],
        [owner.expires_ns for owner in owners],
    )


def name_rows(flight: Flight, names: RowNames | None = None) -> None:
    """Write the flight's owners into its record; ``names`` are theirs, if they are known."""
    record, names = flight.record, names or names_of(flight.owners)
    record.session, record.session_epoch, record.window_end_ns, record.expires_ns = names
