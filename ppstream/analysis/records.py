"""The declaration of the log's lines, and one run's log as typed records; nothing is judged here.

``EnvelopeLine`` and ``PolicyLine`` declare every field of the two lines of an envelope. The records
that the loops fill (``observe/log_writer.py``), the reader (``log_parser.py``) and the header of a
result (``links/headers.py``) take the fields from here by name. A new stamp is one line here: in
the class of its line, or in ``PolicyRankTimes`` if both ranks write it.

Data only: ``log_parser.py`` makes records of decoded lines, ``log_reader.py`` reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from ppstream.core.quantiles import Quantiles, binned_quantiles

Json = Mapping[str, object]

TOTAL: Final = "total"
ENVELOPES: Final = "envelopes"
REQUESTS: Final = "requests"  # ``kind`` of the gateway's lines
GATEWAY: Final = "gateway"  # event of rank 0's: it has ended

#: Reasons why a gateway's client got no actions for a request.
RequestError = Literal[
    "bad_request",  # it is not what the map, or the wire, says
    "busy",  # the client, or too many others, had one in work
    "refused",  # rank 0 gave no row, the token is wrong, or too many came within a second
    "not_ready",  # the run took no samples
    "prompt",  # the policy did not follow the prompt
    "timeout",  # no actions came within ``timeout_ms``
    "not_executable",  # they came behind their lease, or are no actions
    "peer_lost",  # rank 0 left, or began anew
    "superseded",  # a later observation was answered instead: LeRobot's clients alone
    "gone",  # the connection ended before the answer, or its client reads nothing
    "gateway_ends",
    "gateway_failed",
]


@dataclass(frozen=True, slots=True)
class Topology:
    """Shape of a run: the resources, audits and the model depend on it."""

    threads: str  # serial | split
    order: str  # send_first | decode_first
    credit: str  # before_window | after_window
    d_in: int
    d_out: int
    world_size: int
    replicas: int
    device_stamped: bool  # rank 0's stamps are device events mapped to its host clock
    parts: tuple[tuple[str, ...], ...] = ()  # of the policy, by rank; (): not logged
    devices: tuple[str, ...] = ()  # by rank
    members: tuple[int, ...] = ()  # ranks of meshes behind their leaders
    leaders: tuple[int, ...] = ()  # of each of these

    @property
    def places(self) -> int:
        """Policy ranks that each envelope passes: places 1 to n of a chain; replicas are one."""
        return max(1, (self.world_size - 1) // self.replicas)

    @property
    def is_chain(self) -> bool:
        return self.places > 1

    @property
    def lead(self) -> int:
        """So many A stand in front of a decode on the one thread of rank 0."""
        return 0 if self.order == "decode_first" else min(self.places * self.replicas, self.d_in)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The policy ranks as serial resources."""
        return tuple(f"place{k}" for k in self.ranks) if self.is_chain else ("mesh",)

    @property
    def ranks(self) -> range:
        """Numbers of the places of policy ranks."""
        return range(1, self.places + 1)

    @property
    def has_replicas(self) -> bool:
        return self.replicas > 1 and not self.is_chain

    @property
    def replica_ranks(self) -> range:
        """Ranks that take envelopes in turn; none where each envelope passes all policy ranks."""
        return range(1, 1 + self.replicas) if self.has_replicas else range(0)

    def ranks_of(self, place: int) -> tuple[int, ...]:
        """The ranks that a place is."""
        return tuple(self.replica_ranks) if place and self.has_replicas else (place,)

    def title(self, place: int) -> str:
        """A place for people: its number, its parts and its device, as far as they are known."""
        parts = ", ".join(self.parts_of(place))
        known = " on ".join(text for text in (parts, self.device_of(place)) if text)
        if place and self.has_replicas:
            return f"{self.replicas} replicas" + (f" ({known})" if known else "")
        return f"place {place}" + (f" ({known})" if known else "")

    def parts_of(self, place: int) -> tuple[str, ...]:
        return self.parts[place] if place < len(self.parts) else ()

    def device_of(self, place: int) -> str:
        return self.devices[place] if place < len(self.devices) else ""

    @property
    def in_system(self) -> int:
        """Most envelopes between tA0 and tEmit: both queues, one preflighted, one in A, in C."""
        return self.d_in + self.d_out + 3


class IsolatedTimes(NamedTuple):
    """Mean stage times measured alone, the other rank idle, in the process that then ran."""

    a_ns: int
    b_ns: int  # of a chain: of its slowest place; of replicas: of all
    c_ns: int
    places_ns: tuple[int, ...] = ()  # of a chain: stage B of each place
    parts_ns: Mapping[str, int] = MappingProxyType({})  # of the policy's parts, where timed
    replicas_ns: tuple[int, ...] = ()  # of replicas: stage B of each


def in_header(word: int) -> Any:
    """A field that the result's header carries to rank 0, at position ``word`` behind its status.

    A new field takes the next number; no field takes the number of another.
    """
    return field(default=None, metadata={"word": word})


def header_words(line: type) -> dict[str, int]:
    """The fields of ``line`` that a result's header carries, with their positions."""
    return {f.name: f.metadata["word"] for f in fields(line) if "word" in f.metadata}


@dataclass
class LineHead:
    """The first fields of both lines of an envelope; the writer keeps the order of the fields.

    Instants are CLOCK_MONOTONIC of the rank that wrote the line, in nanoseconds; durations end in
    ``_ns``. None: absent.
    """

    __slots__ = ()

    kind: str = ""
    run_id: str = ""
    generation: int = -1  # of this start of the run
    epoch: int = -1
    lane: int = -1
    seq: int = -1  # counts from 0 in each epoch
    mode: str = ""  # throughput | attribution | trace: what the line's times are worth
    phase: str | None = None  # warming | bring-up | ready | degraded | draining


@dataclass
class PolicyRankTimes:
    """The policy rank's measurements of one envelope that both lines contain."""

    __slots__ = ()

    eB_ns: int | None = in_header(3)  # B on the device; in the header 0 where there is none
    wait_input_ns: int | None = in_header(4)  # the policy rank waited for this envelope
    wait_output_ns: int | None = in_header(5)  # for a slot to put its result in
    idle_ns: int | None = in_header(6)  # from the end of the B before to the begin of this one
    residence_ns: int | None = in_header(7)  # from the complete envelope to the committed result


@dataclass
class _Rank0Stamps(LineHead):
    __slots__ = ()

    pacing: str | None = None  # saturated | tick | sample | rows | free
    tA0: int | None = None  # A begins
    tA1: int | None = None  # A is over
    tSend: int | None = None  # the envelope is committed to the link
    tRecv: int | None = None  # its result is received
    tDecode: int | None = None  # C begins
    tEmit: int | None = None  # the actions are emitted; None: dropped
    tPick: int | None = None  # the host has the actions, where tEmit is a device's
    tRx: int | None = None  # arrival of the newest sample used
    eA_ns: int | None = None  # A on the device
    eC_ns: int | None = None  # C on the device
    B_ns: int | None = in_header(2)  # tB1 - tB0
    eB_ns: int | None = None  # eB_ns and idle_ns are ``PolicyRankTimes``'s; rank 0 writes them here
    idle_ns: int | None = None


@dataclass(slots=True)
class EnvelopeLine(PolicyRankTimes, _Rank0Stamps):
    """Rank 0's line of one envelope, written when it is emitted or dropped.

    Waits are measured around the blocking call itself. Fields of rows are lists if the window has
    several rows; times of the robot's clock are never compared with a stamp.
    """

    w_input_ns: int | None = None  # A waited for samples, or until it was due
    w_credit_ns: int | None = None  # for a credit
    w_slot_ns: int | None = None  # for a slot
    w_result_ns: int | None = None  # C waited for a result
    w_emit_ns: int | None = None  # for the consumer of the actions
    busy_link_ns: int | None = None  # of the thread that runs A; serial: of the only one
    busy_link_c_ns: int | None = None  # of the thread that runs C, if it has one of its own
    cpu_a_ns: int | None = None  # CPU time of A's thread, within A
    cpu_c_ns: int | None = None  # of C's, within C
    run_delay_ns: int | None = None  # A's thread was runnable without a CPU, since the last line
    run_delay_c_ns: int | None = None  # C's, if it has one of its own
    delay_a_ns: int | None = None  # of the former, within A
    delay_c_ns: int | None = None  # of C's thread, within C
    outstanding: int | None = None  # envelopes committed and not answered, at emit
    q_decode: int | None = None  # results received that C has not begun, at emit
    outstanding_max: int | None = None  # since the last line
    q_decode_max: int | None = None
    outstanding_ns_total: int | None = None  # integral over time, of the whole run
    q_decode_ns_total: int | None = None
    age_rank0_ns: int | None = None  # tEmit - tRx
    window_end_ns: int | list[int] | None = None  # of rows, robot's clock
    expires_ns: int | list[int] | None = None  # of rows, robot's clock
    session: int | list[int] | None = None  # of rows
    session_epoch: int | list[int] | None = None  # of rows
    input_age_ns: Mapping[str, Any] | None = None  # by stream: newest sample to the window's end
    drop: str | None = None  # why it was not emitted
    replica: int | None = None  # rank that got the envelope, where policy ranks take turns


@dataclass
class _PolicyStamps(LineHead):
    __slots__ = ()

    tB0: int | None = in_header(0)  # B begins
    tB1: int | None = in_header(1)  # B is over
    tOut: int | None = None  # its output is committed, by a host's clock


@dataclass(slots=True)
class PolicyLine(PolicyRankTimes, _PolicyStamps):
    """The policy rank's line of one envelope."""

    busy_link_ns: int | None = in_header(8)  # of the loop's thread, inside send and receive calls
    cpu_b_ns: int | None = None  # CPU time of the loop's thread, within B
    run_delay_ns: int | None = None  # that thread was runnable without a CPU, since the last line
    delay_b_ns: int | None = None  # of that, within B
    allocs: int | None = None
    recompiles: int | None = None  # since the last line
    drop: str | None = None  # why the policy gave no actions
    rows: int | None = None  # of the batch that the policy was called with

    @property
    def B_ns(self) -> int | None:
        """The duration that rank 0's line has."""
        return None if self.tB0 is None or self.tB1 is None else self.tB1 - self.tB0


@dataclass(slots=True)
class PolicyAnswer(PolicyLine):
    """The policy rank's line of one envelope after reading."""

    replica: int | None = None  # the rank that wrote it, where policy ranks take turns


@dataclass(slots=True)
class Envelope(EnvelopeLine):
    """Rank 0's line of one envelope after reading; the policy ranks' lines fill missing fields.

    The reader reduces the fields of rows to ``lease_ns``, ``asked``, ``asked_ahead`` and to the
    oldest row's ``input_age_ns``; ``window_end_ns``, ``expires_ns``, ``session`` and
    ``session_epoch`` stay None. Once a ``RunLog`` has it, nothing changes it.
    """

    lease_ns: int | None = None  # shortest ``expires_ns - window_end_ns`` of its rows
    asked: int | None = None  # robots with a newer window than before; None: rows are not named
    asked_ahead: int | None = None  # of them, those whose window before was under way at tA0
    is_emitted: bool = False  # and not dropped
    places: tuple[PolicyAnswer | None, ...] = ()  # the line of each policy rank, in their order

    @property
    def stage1(self) -> PolicyAnswer | None:
        """The line of the only policy rank, or of the replica; in a chain of the last rank."""
        return self.places[-1] if self.places else None

    @property
    def answered_by(self) -> int | None:
        """Of replicas: the rank whose log has the line."""
        return None if self.stage1 is None else self.stage1.replica

    @property
    def picked(self) -> int | None:
        """The moment at which the host has the actions: a device's stage C ends before."""
        return self.tEmit if self.tPick is None else self.tPick


class LogEvent(NamedTuple):
    rank: int
    generation: int
    name: str
    t: int | None
    epoch: int | None  # of an epoch_cut: the new epoch (``to`` when given, else ``epoch``)
    phase: str | None = None  # of a phase event: the one that begins
    fields: Json = MappingProxyType({})  # the line as it stands


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A rank's GPU in its ``memory`` line: bytes now, and counts since the process began."""

    allocated_bytes: int | None = None  # in tensors
    allocated_max_bytes: int | None = None  # the most so far
    reserved_bytes: int | None = None  # what torch keeps from CUDA; the rest of it is cache
    non_torch_bytes: int | None = None  # neither reserved nor free
    free_bytes: int | None = None
    total_bytes: int | None = None
    allocations: int | None = None  # blocks asked of torch's allocator
    segments: int | None = None  # asked of CUDA: each one may stall the device
    alloc_retries: int | None = None  # caches emptied because memory ran short
    ooms: int | None = None  # allocations refused
    others_bytes: int | None = None  # of processes outside the run, as NVML lists them
    found_bytes: int | None = None  # in use on the device before this rank used it


@dataclass(frozen=True, slots=True)
class MemoryLine(GpuMemory):
    """Memory of one rank's process at a ``memory`` line; None: absent."""

    rank: int = 0
    generation: int = 0
    t: int | None = None
    resident_bytes: int | None = None  # in RAM


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
    is_on_request: bool = False  # then holes between samples mean nothing

    @property
    def imbalance(self) -> int:
        """Samples that went missing (positive) or were counted twice (negative)."""
        return self.received - self.used - self.in_flight - sum(self.dropped.values())

    @property
    def invalid_share(self) -> float | None:
        """Of the windows' targets of this stream; None: not counted."""
        return self.invalid / self.targets if self.targets and self.invalid is not None else None


class RuleCounts(NamedTuple):
    """Counts of the chunks for robots that ``[actions]`` judged, as last written."""

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


@dataclass(slots=True)
class RobotRequests:
    """Requests for actions of one robot on one wire.

    In a line of the gateway's log: since the robot's line before. In a ``RunLog``: of the run.
    """

    wire: str
    robot: str
    requests: int = 0
    answered: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # by ``RequestError``
    unanswered: int = 0  # at the end of the line's time, or of the log
    max_ns: int = 0  # from receipt to answer, of those that were answered
    bins: dict[int, int] = field(default_factory=dict)  # the same times, as ``bin_of`` counts

    def add(self, other: RobotRequests) -> None:
        """Add another one's counts to these."""
        self.requests += other.requests
        self.answered += other.answered
        self.unanswered += other.unanswered
        self.max_ns = max(self.max_ns, other.max_ns)
        for reason, n in other.errors.items():
            self.errors[reason] = self.errors.get(reason, 0) + n
        for index, n in other.bins.items():
            self.bins[index] = self.bins.get(index, 0) + n

    @property
    def imbalance(self) -> int:
        """Requests that went missing (positive) or ended twice (negative)."""
        return self.requests - self.answered - sum(self.errors.values()) - self.unanswered

    @property
    def latency(self) -> Quantiles | None:
        """Times from receipt to answer; None without an answer."""
        return binned_quantiles(self.bins, self.max_ns)


class EnvelopeLedger(NamedTuple):
    """The ledger of envelopes at one moment of rank 0's clock."""

    generation: int
    t: int | None
    finished: int  # emitted or dropped: each has a line
    imbalance: int


class RobotStateLine(NamedTuple):
    """One robot's newest account of its session so far; None: it did not say."""

    session: int
    holds: int | None  # times it began to hold
    held_ns: int | None  # in a ``RunLog`` without what the session before told of the same hold
    faults: int | None
    fault: str | None  # the newest one
    chunk_gap_ns: int | None  # longest time between two chunks
    robot: str | None = None  # its name; None: a log that has none

    @property
    def name(self) -> str:
        """For people, who may see several sessions of one robot."""
        session = f"session {self.session:x}"
        return f"of {session}" if not self.robot else f"{self.robot} ({session})"


class Chunks(NamedTuple):
    """Chunks that a robot tells of in a session."""

    executed: int
    total: int


@dataclass(frozen=True, slots=True)
class RunLog:
    """Everything one run left behind, in order of generation, lane, epoch and seq."""

    run_id: str
    topology: Topology
    config: Json
    finished: bool
    envelopes: tuple[Envelope, ...]
    events: tuple[LogEvent, ...] = ()
    members: Mapping[int, Sequence[PolicyLine]] = field(default_factory=dict)  # of a mesh
    ages_ns: Sequence[int] = ()  # of executed chunks, measured by the robots themselves
    #: Of the other chunks by session, as its robot received them.
    unexecuted_ages_ns: Mapping[int, Sequence[int]] = field(default_factory=dict)
    oldest_ns: int | None = None  # of any single action executed; None: no robot said it
    standalone: IsolatedTimes | None = None  # directly before bring-up
    standalone_after: IsolatedTimes | None = None  # directly behind it
    ledgers: tuple[Ledger, ...] = ()  # of the newest generation
    envelope_ledgers: tuple[EnvelopeLedger, ...] = ()
    rule_counts: RuleCounts | None = None  # of the newest generation; None: not logged
    robot_states: tuple[RobotStateLine, ...] = ()  # by session
    first_waits_ns: Mapping[int, int] = field(default_factory=dict)  # by session, for a chunk
    session_gaps_ns: Mapping[int, int] = field(default_factory=dict)  # the longest, of rank 0
    #: By session: its generation, and rank 0's stamp of the first that its robot told of itself.
    sessions_begun: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    session_chunks: Mapping[int, Chunks] = field(default_factory=dict)  # that its robot tells of
    unbelievable: int = 0  # reports of robots that are left out: their ages cannot be
    strangers: tuple[str, ...] = ()  # files with lines of another run, which are left out
    exits: Json = field(default_factory=dict)  # exit.json as it stands
    memory: tuple[MemoryLine, ...] = ()  # some one a second of each rank
    requests: tuple[RobotRequests, ...] = ()  # that gateways logged, by wire and robot
    torn_lines: int = 0
    missing_ranks: tuple[int, ...] = ()
    ignored_lines: int = 0
    manifest: Json = field(default_factory=dict)  # run.json as it stands

    @property
    def newest_generation(self) -> int:
        """Of the envelopes; 0 without any."""
        return self.envelopes[-1].generation if self.envelopes else 0

    @property
    def stream_ledgers(self) -> list[Ledger]:
        """Ledgers of single streams."""
        return [ledger for ledger in self.ledgers if ledger.stream not in (TOTAL, ENVELOPES)]
