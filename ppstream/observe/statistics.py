"""Statistics that the loops count and the metrics show, made by ``statistics()`` of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CreditStatistics:
    """Counts of one moment; the totals run since the start."""

    outstanding: int
    q_decode: int
    in_system: int
    committed: int
    received: int
    emitted: int


@dataclass(frozen=True, slots=True)
class StageCStatistics:
    """Counts since the start: envelopes of every phase, and chunks that were made for robots.

    Chunks of bring-up reach no robot and are not counted. A chunk is one row of an envelope;
    ``violations`` has those that a rule of ``[actions]`` refused, by rule.
    """

    emitted: int
    dropped: dict[str, int]  # envelopes, by reason
    chunks: int  # held to the rules
    clipped_chunks: int  # of them, with a value outside its limits
    clipped_values: int
    violations: dict[str, int]


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Counts since the start.

    Frames: ``frames_received = frames_handled + frames_dropped`` by reason. Samples that reached a
    ring are in that ring's ledger; ``samples_early`` came before the run was ready.
    ``connections_refused``: what never came to speak, by reason, and connections that ended.
    Chunks: given to ``emit`` = ``chunks_sent + chunks_dropped`` by reason.
    """

    open: int
    opened: int
    closed: dict[str, int]
    refused: dict[str, int]
    frames_received: int
    frames_handled: int
    frames_dropped: dict[str, int]
    connections_refused: dict[str, int]
    samples_early: int
    resets: int
    instructions: int
    images_decoded: int
    image_decode_ns: int
    reports_lost: int
    chunks_sent: int
    chunks_dropped: dict[str, int]
