"""Flight: one envelope on its way through the pipeline, as rank 0 remembers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ppstream.timestamps import EnvelopeRecord


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
