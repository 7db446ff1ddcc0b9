"""One run's log as typed records: what stands in the lines, before anything is judged.

Data only: ``log_parser.py`` makes them from decoded lines, ``log_reader.py`` reads those from disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

Json = Mapping[str, object]

TOTAL: Final = "total"
ENVELOPES: Final = "envelopes"


@dataclass(frozen=True, slots=True)
class Topology:
    """How the ranks ran; the resources, audits and the model depend on it."""

    threads: str  # serial | split
    order: str  # send_first | decode_first
    credit: str  # before_window | after_window
    d_in: int
    d_out: int
    world_size: int
    replicas: int
    device_stamped: bool  # rank 0's stamps are device events mapped to its host clock

    @property
    def in_system(self) -> int:
        """Most envelopes between tA0 and tEmit: both queues, one preflighted, one in A, in C."""
        return self.d_in + self.d_out + 3


class Standalone(NamedTuple):
    """Mean stage times measured alone, the other rank idle, in the process that then ran."""

    a_ns: int
    b_ns: int
    c_ns: int


@dataclass(frozen=True, slots=True)
class Stage1:
    """The policy rank's own line of one envelope; instants are of that rank's clock."""

    tB0: int | None = None
    tB1: int | None = None
    eB_ns: int | None = None
    wait_input_ns: int | None = None
    wait_output_ns: int | None = None
    idle_ns: int | None = None
    residence_ns: int | None = None
    busy_link_ns: int | None = None
    cpu_b_ns: int | None = None  # of the loop's thread, within B
    run_delay_ns: int | None = None  # that thread was runnable without a CPU
    delay_b_ns: int | None = None  # of that, within B
    recompiles: int | None = None  # since the previous line


@dataclass(frozen=True, slots=True)
class Envelope:
    """Rank 0's line of one envelope: integer nanoseconds of rank 0's clock, None where absent."""

    generation: int
    epoch: int
    lane: int
    seq: int
    mode: str
    phase: str | None
    pacing: str | None
    drop: str | None
    lease_ns: int | None  # shortest ``expires_ns - window_end_ns`` of its rows
    stage1: Stage1 | None = None
    input_age_ns: Mapping[str, int] | None = None  # by stream, of the oldest row
    tRx: int | None = None
    tA0: int | None = None
    tA1: int | None = None
    tSend: int | None = None
    tRecv: int | None = None
    tDecode: int | None = None
    tEmit: int | None = None
    tPick: int | None = None
    eA_ns: int | None = None
    eC_ns: int | None = None
    B_ns: int | None = None
    eB_ns: int | None = None
    idle_ns: int | None = None
    wait_input_ns: int | None = None
    wait_output_ns: int | None = None
    residence_ns: int | None = None
    w_input_ns: int | None = None
    w_credit_ns: int | None = None
    w_slot_ns: int | None = None
    w_result_ns: int | None = None
    w_emit_ns: int | None = None
    busy_link_ns: int | None = None
    busy_link_c_ns: int | None = None
    cpu_a_ns: int | None = None
    cpu_c_ns: int | None = None
    run_delay_ns: int | None = None
    run_delay_c_ns: int | None = None
    delay_a_ns: int | None = None
    delay_c_ns: int | None = None
    outstanding: int | None = None
    outstanding_max: int | None = None
    outstanding_ns_total: int | None = None
    q_decode_max: int | None = None
    q_decode_ns_total: int | None = None
    age_rank0_ns: int | None = None

    @property
    def is_emitted(self) -> bool:
        return self.drop is None and self.tEmit is not None

    @property
    def picked(self) -> int | None:
        """The moment at which the host has the actions: a device's stage C ends before."""
        return self.tEmit if self.tPick is None else self.tPick


class Event(NamedTuple):
    rank: int
    generation: int
    name: str
    t: int | None
    epoch: int | None  # of an epoch_cut: the new epoch (``to`` when given, else ``epoch``)
    phase: str | None = None  # of a phase event: the one that begins
    fields: Json = MappingProxyType({})  # the line as it stands


class Memory(NamedTuple):
    """What one rank's process held when it wrote a ``memory`` line; all but RAM is its GPU's."""

    rank: int
    generation: int
    t: int | None
    resident_bytes: int | None
    allocated_bytes: int | None = None
    allocated_max_bytes: int | None = None
    reserved_bytes: int | None = None
    non_torch_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    allocations: int | None = None  # since the process began, as the others below
    segments: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


class Ledger(NamedTuple):
    """Samples of one stream, or of all (``TOTAL``), or ``ENVELOPES``, as last written."""

    stream: str
    received: int
    used: int
    in_flight: int
    dropped: dict[str, int]
    holes: int | None = None  # in its samples, wider than max_gap_ms
    longest_hole_ns: int | None = None
    targets: int | None = None  # of windows
    invalid: int | None = None  # of them

    @property
    def imbalance(self) -> int:
        """Samples that went missing (positive) or were counted twice (negative)."""
        return self.received - self.used - self.in_flight - sum(self.dropped.values())

    @property
    def invalid_share(self) -> float | None:
        """Of the windows' targets of this stream; None: not counted."""
        return self.invalid / self.targets if self.targets and self.invalid is not None else None


class RuleCounts(NamedTuple):
    """What the rules of ``[actions]`` did to the chunks for robots, as last written."""

    chunks: int
    clipped_chunks: int
    clipped_values: int
    refused: dict[str, int]  # chunks, by the rule that they break

    @property
    def text(self) -> str:
        """Of how many chunks what was done."""
        refused = sum(self.refused.values())
        why = f" ({', '.join(f'{n} {rule}' for rule, n in self.refused.items())})"
        return (
            f"{self.clipped_chunks} of {self.chunks} chunks clipped"
            + (f" ({self.clipped_values} values)" if self.clipped_values else "")
            + (f", {refused} refused{why}" if refused else ", none refused")
        )


class EnvelopeBook(NamedTuple):
    """The ledger of envelopes at one moment of rank 0's clock."""

    generation: int
    t: int | None
    finished: int  # emitted or dropped: each has a line
    imbalance: int


class RobotState(NamedTuple):
    """One robot's newest account of its session so far; None: it did not say."""

    session: int
    holds: int | None  # times it began to hold
    held_ns: int | None
    faults: int | None
    fault: str | None  # the newest one
    chunk_gap_ns: int | None  # longest time between two chunks


@dataclass(frozen=True, slots=True)
class RunLog:
    """Everything one run left behind, in order of generation, lane, epoch and seq."""

    run_id: str
    topology: Topology
    config: Json
    finished: bool
    envelopes: tuple[Envelope, ...]
    events: tuple[Event, ...] = ()
    ages_ns: tuple[int, ...] = ()  # of executed chunks, measured by the robots themselves
    oldest_ns: int | None = None  # of any single action executed; None: no robot said it
    standalone: Standalone | None = None  # directly before bring-up
    standalone_after: Standalone | None = None  # directly behind it
    ledgers: tuple[Ledger, ...] = ()  # of the newest generation
    envelope_books: tuple[EnvelopeBook, ...] = ()
    rule_counts: RuleCounts | None = None  # of the newest generation; None: not logged
    robot_states: tuple[RobotState, ...] = ()  # by session
    unbelievable: int = 0  # reports of robots that are left out: their ages cannot be
    strangers: tuple[str, ...] = ()  # files with lines of another run, which are left out
    exits: Json = field(default_factory=dict)  # exit.json as it stands
    memory: tuple[Memory, ...] = ()  # some one a second of each rank
    torn_lines: int = 0
    missing_ranks: tuple[int, ...] = ()
    ignored_lines: int = 0
    manifest: Json = field(default_factory=dict)  # run.json as it stands
