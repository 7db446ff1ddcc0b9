"""Decoded log lines to records. Pure: takes objects that JSON already decoded, reads no file.

Keys that are not known are ignored, so that logs of other writers and of later minor versions can
be read; a known key with a value of the wrong type is refused, with the place where it stands.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import Any, Final, NamedTuple, get_type_hints

from ppstream.analysis.answers import identity_of, joined, order_of
from ppstream.analysis.json_values import INT_MAX, int_of, mapping_of, shown, text_of
from ppstream.analysis.line_columns import Lines
from ppstream.analysis.records import (
    ENVELOPES,
    REQUESTS,
    TOTAL,
    Envelope,
    EnvelopeLedger,
    EnvelopeLine,
    IsolatedTimes,
    Json,
    Ledger,
    LogEvent,
    MemoryLine,
    PolicyAnswer,
    PolicyLine,
    RobotRequests,
    RobotStateLine,
    RuleCounts,
    RunLog,
    Topology,
)
from ppstream.analysis.requests import GatewayTotals, WindowRequests, is_on_request
from ppstream.analysis.robot_states import ChunkReports, RobotStates
from ppstream.core.errors import LogError
from ppstream.core.quantiles import BINS

SCHEMA: Final = "ppstream.log/"
SCHEMA_MAJOR: Final = 1
RANKS_MAX: Final = 1024
DEPTH_MAX: Final = 4096  # of D_in and D_out
AGE_MAX_NS: Final = 3_600_000_000_000  # an hour: no robot executes an older action
COUNT_MAX: Final = 1 << 62  # of what a robot counts, in ns too


class LogLine(NamedTuple):
    """One decoded log line and where it stood; ``rank`` and ``generation`` are its file's."""

    rank: int
    generation: int
    where: str
    fields: Json


def parse_run(
    manifest: Json,
    lines: Iterable[LogLine],
    *,
    torn_lines: int = 0,
    missing_ranks: tuple[int, ...] = (),
    exits: Json | None = None,
) -> RunLog:
    """Sort the lines of one run into records; a run that still goes on is fine.

    Lines of another run are left out, and their files named.

    Raises:
        LogError: unknown schema, no usable topology, or a value of the wrong type.
    """
    check_schema(manifest, "run.json")
    topology = _topology(manifest)
    config = mapping_of(manifest.get("config"))
    found = _Sorted(manifest.get("run_id"), topology, is_asked=is_on_request(config))
    for line in lines:
        found.add(line)
    newest = max((generation for generation, _ in found.ledgers), default=0)
    return RunLog(
        run_id=str(manifest.get("run_id", "?")),
        topology=topology,
        config=config,
        finished=manifest.get("finished_utc") is not None,
        envelopes=joined(found.envelopes, found.policies, topology),
        events=tuple(found.events),
        members={rank: [*lines] for rank, lines in found.members.items()},
        ages_ns=found.chunks.ages_ns,
        unexecuted_ages_ns=found.chunks.unexecuted_ages_ns,
        oldest_ns=found.chunks.oldest_ns or None,
        standalone=_standalone(manifest, "standalone"),
        standalone_after=_standalone(manifest, "standalone_after"),
        ledgers=tuple(part for (at, _), part in found.ledgers.items() if at == newest),
        envelope_ledgers=tuple(found.books),
        rule_counts=found.rule_counts.get(newest),
        robot_states=found.states.by_session(),
        first_waits_ns=found.window_requests.first_waits_ns,
        session_gaps_ns=found.window_requests.gaps_ns,
        sessions_begun=found.states.begun,
        session_chunks=found.chunks.by_session,
        unbelievable=found.unbelievable,
        strangers=tuple(found.strangers),
        exits=exits or {},
        memory=tuple(found.memory),
        requests=found.requests.by_robot(),
        torn_lines=torn_lines,
        missing_ranks=missing_ranks,
        ignored_lines=found.ignored,
        manifest=manifest,
    )


class _Sorted:
    """Lines by their kind."""

    def __init__(self, run_id: object, topology: Topology, *, is_asked: bool) -> None:
        self.envelopes = Lines(Envelope, order_of)
        self.policies: dict[int, Lines[PolicyAnswer]] = defaultdict(_answer_lines)  # by rank
        self.members = {rank: _answer_lines() for rank in topology.members}
        self._topology = topology
        self.events: list[LogEvent] = []
        self.chunks = ChunkReports()
        self.ledgers: dict[tuple[int, str], Ledger] = {}
        self.books: list[EnvelopeLedger] = []
        self.rule_counts: dict[int, RuleCounts] = {}  # by generation
        self.states = RobotStates()
        self.memory: list[MemoryLine] = []
        self.requests = GatewayTotals()
        self.unbelievable = self.ignored = 0
        self.strangers: dict[str, None] = {}  # an ordered set
        self.window_requests = WindowRequests(is_asked=is_asked)
        self._run_id = run_id

    def add(self, line: LogLine) -> None:
        theirs = line.fields.get("run_id")
        if isinstance(self._run_id, str) and isinstance(theirs, str) and theirs != self._run_id:
            self.strangers[line.where.rpartition(":")[0]] = None
            return
        kind = line.fields.get("kind")
        if kind == "envelope":
            envelope = _envelope(line)
            self.window_requests.count(envelope, line.fields)
            self.envelopes.append(envelope)
        elif kind == "stage1":
            if line.rank in self.members:
                self.members[line.rank].append(_stage1(line, self._topology))
            elif self._topology.places == 1 or line.rank in self._topology.ranks:
                self.policies[line.rank].append(_stage1(line, self._topology))
            else:
                self.ignored += 1
        elif kind == "event":
            self.events.append(_event(line))
        elif kind == "robot":
            self._robot(line)
        elif kind == "robot_state":
            self._robot_state(line)
        elif kind == "ledger":
            self._ledger(line)
        elif kind == "memory":
            self.memory.append(_memory(line))
        elif kind == REQUESTS:
            self.requests.add(line.generation, _requests(line))
        else:
            self.ignored += 1

    def _robot(self, line: LogLine) -> None:
        session, age_ns, oldest_ns = [
            int_of(line.fields, name, line.where) for name in ("session", "age_ns", "oldest_ns")
        ]
        if not (0 <= (age_ns or 0) <= AGE_MAX_NS and 0 <= (oldest_ns or 0) <= AGE_MAX_NS):
            self.unbelievable += 1
            return
        is_executed = line.fields.get("executed") != 0
        self.chunks.add(session or 0, age_ns, oldest_ns or 0, is_executed=is_executed)

    def _robot_state(self, line: LogLine) -> None:
        found = line.fields
        session = int_of(found, "session", line.where)
        counts = {name: int_of(found, name, line.where) for name in _ROBOT_COUNTS}
        if any(n is not None and not 0 <= n <= COUNT_MAX for n in counts.values()):
            self.unbelievable += 1
            return
        texts = (text_of(found.get(name)) for name in ("fault", "robot"))
        fault, robot = (shown(text) if text else None for text in texts)
        state = RobotStateLine(session or 0, fault=fault, robot=robot, **counts)
        self.states.add(line.generation, int_of(found, "t", line.where), state)

    def _ledger(self, line: LogLine) -> None:
        if "actions" in line.fields:
            table = mapping_of(line.fields["actions"])
            self.rule_counts[line.generation] = _rule_counts(table, line.where)
        for part in _ledgers(line):
            self.ledgers[line.generation, part.stream] = part
            if part.stream == ENVELOPES:
                t = int_of(line.fields, "t", line.where)
                finished = part.received - part.in_flight
                self.books.append(EnvelopeLedger(line.generation, t, finished, part.imbalance))


def check_schema(record: Json, where: str) -> None:
    """Refuse a record of another format or of a major version this reader does not know."""
    schema = record.get("schema")
    major = schema[len(SCHEMA) :].split(".")[0] if isinstance(schema, str) else ""
    if not (isinstance(schema, str) and schema.startswith(SCHEMA) and major == str(SCHEMA_MAJOR)):
        raise LogError(
            f"{where}: schema is {schema!r}, this reader knows {SCHEMA}{SCHEMA_MAJOR}; "
            "use the version of the report that came with the writer"
        )


def _standalone(manifest: Json, name: str) -> IsolatedTimes | None:
    """Means; medians where a writer has no means."""
    table, where = mapping_of(manifest.get(name)), f"run.json: {name}"
    means = [int_of(table, f"{stage}_mean_ns", where) for stage in "ABC"]
    medians = [int_of(table, f"{stage}_ns", where) for stage in "ABC"]
    times = [median if mean is None else mean for mean, median in zip(means, medians, strict=True)]
    a_ns, b_ns, c_ns = times
    if a_ns is None or b_ns is None or c_ns is None or min(a_ns, b_ns, c_ns) < 0:
        return None
    parts = mapping_of(table.get("parts_ns"))
    places_ns = _numbers(table.get("places_ns"), f"{where}.places_ns")
    replicas_ns = _numbers(table.get("replicas_ns"), f"{where}.replicas_ns")
    parts_ns = {shown(name): int_of(parts, name, where) or 0 for name in parts}
    if min((*places_ns, *replicas_ns, *parts_ns.values()), default=0) < 0:
        return None
    return IsolatedTimes(a_ns, b_ns, c_ns, places_ns, parts_ns, replicas_ns)


def _numbers(value: object, where: str) -> tuple[int, ...]:
    found = value if isinstance(value, list) else []
    return tuple(int_of({"ns": ns}, "ns", where) or 0 for ns in found)


def _topology(manifest: Json) -> Topology:
    table = mapping_of(manifest.get("topology"))
    ranks = table.get("ranks")
    rank_tables = [mapping_of(rank) for rank in ranks] if isinstance(ranks, list) else []
    rank_tables.sort(key=lambda rank: int_of(rank, "rank", "run.json topology.ranks") or 0)
    world_size = ranks_of(manifest)
    lone = world_size == 1  # nothing is handed over: no bounds are needed
    return Topology(
        threads=_choice(table, "threads", ("serial", "split"), "serial"),
        order=_choice(table, "order", ("send_first", "decode_first"), "send_first"),
        credit=_choice(table, "credit", ("before_window", "after_window"), "before_window"),
        d_in=1 if lone else _bound(table, "d_in", DEPTH_MAX),
        d_out=1 if lone else _bound(table, "d_out", DEPTH_MAX),
        world_size=world_size,
        replicas=_bound(table, "replicas", RANKS_MAX) if table.get("replicas") else 1,
        device_stamped=any(
            rank.get("rank") == 0 and rank.get("stamp_source") == "device" for rank in rank_tables
        ),
        parts=tuple(_names(rank.get("parts")) for rank in rank_tables),
        devices=tuple(shown(str(rank.get("device") or "")) for rank in rank_tables),
        members=_members(table.get("members"), "rank"),
        leaders=_members(table.get("members"), "leader"),
    )


def _members(value: object, key: str) -> tuple[int, ...]:
    tables = [mapping_of(found) for found in value] if isinstance(value, list) else []
    ranks = (int_of(found, key, "run.json topology.members") for found in tables)
    return tuple(rank for rank in ranks if rank is not None)


def _names(value: object) -> tuple[str, ...]:
    return tuple(shown(str(name)) for name in value) if isinstance(value, list) else ()


def _choice(table: Json, key: str, allowed: tuple[str, ...], default: str) -> str:
    value = table.get(key, default)
    if isinstance(value, str) and value in allowed:
        return value
    raise LogError(f"run.json: topology.{key} is {value!r}, expected one of {', '.join(allowed)}")


def _bound(table: Json, key: str, most: int) -> int:
    value = int_of(table, key, "run.json topology")
    if value is None or not 1 <= value <= most:
        raise LogError(f"run.json: topology.{key} is {value}, expected 1 to {most}")
    return value


def ranks_of(manifest: Json) -> int:
    """The number of ranks that ran.

    Raises:
        LogError: no such number of ranks can be.
    """
    table = mapping_of(manifest.get("topology"))
    if table.get("world_size"):
        return _bound(table, "world_size", RANKS_MAX)
    ranks = table.get("ranks")
    return len(ranks) if isinstance(ranks, list) and ranks else 2


def _named(line: type, hint: object) -> tuple[str, ...]:
    """The fields of ``line`` that are declared as ``hint``."""
    return tuple(name for name, found in get_type_hints(line).items() if found == hint)


_LINES: Final[tuple[type, ...]] = (EnvelopeLine, PolicyLine)
_IDS: Final = ("seq", "generation", "lane", "epoch")
_NUMBERS: Final = {line: (*_named(line, int | None), *_IDS) for line in _LINES}
_TEXTS: Final = {line: _named(line, str | None) for line in _LINES}


def _in_order(line: type) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Picks the fields of ``line`` from its numbers, texts, head, and one None for all others."""
    have = (*_NUMBERS[line], *_TEXTS[line], "kind", "run_id", "mode")
    return itemgetter(*(have.index(f.name) if f.name in have else -1 for f in fields(line)))


_IN_ORDER: Final = {line: _in_order(line) for line in _LINES}
_MEMORY: Final = _named(MemoryLine, int | None)
_ROBOT_COUNTS: Final = _named(RobotStateLine, int | None)
_REQUEST_COUNTS: Final = _named(RobotRequests, int)
_BINS: Final = frozenset(map(str, range(BINS)))


def _envelope(line: LogLine) -> Envelope:
    found = line.fields
    envelope = Envelope(*_declared(EnvelopeLine, line))
    envelope.input_age_ns = _input_ages_ns(found.get("input_age_ns"))
    envelope.lease_ns = _lease_ns(found.get("window_end_ns"), found.get("expires_ns"))
    if envelope.tDecode is None:  # the older name of the same stamp
        envelope.tDecode = int_of(found, "tC0", line.where)
    envelope.is_emitted = envelope.drop is None and envelope.tEmit is not None
    return envelope


def _answer_lines() -> Lines[PolicyAnswer]:
    return Lines(PolicyAnswer, identity_of)


def _stage1(line: LogLine, topology: Topology) -> PolicyAnswer:
    replica = line.rank if line.rank in topology.replica_ranks else None
    return PolicyAnswer(*(*_declared(PolicyLine, line), replica))


def _declared(kind: type, line: LogLine) -> tuple[Any, ...]:
    """Numbers, texts and names of the line, as ``kind`` declares its fields: None for others."""
    found, names = line.fields, _NUMBERS[kind]
    numbers: tuple[Any, ...] = (*map(found.get, names),)
    given = [*filter(None, numbers)]  # what nearly all lines have costs no call for each field
    if not {int, type(None)}.issuperset(map(type, numbers)) or (
        given and not -INT_MAX <= min(given) <= max(given) <= INT_MAX
    ):
        numbers = (*(int_of(found, name, line.where) for name in names),)
    *others, seq, generation, lane, epoch = numbers
    if seq is None:
        raise LogError(f"{line.where}: a line of kind {found.get('kind')!r} needs seq")
    ids = seq, line.generation if generation is None else generation, lane or 0, epoch or 0
    texts: Iterable[Any] = (*map(found.get, _TEXTS[kind]),)
    if not {str, type(None)}.issuperset(map(type, texts)):
        texts = map(text_of, texts)
    run_id, mode = found.get("run_id"), found.get("mode") or "throughput"
    head = text_of(found.get("kind")), text_of(run_id) or "", text_of(mode)
    return _IN_ORDER[kind]((*others, *ids, *texts, *head, None))


def _event(line: LogLine) -> LogEvent:
    found, where = line.fields, line.where
    to = int_of(found, "to", where) if found.get("name") == "epoch_cut" else None
    return LogEvent(
        rank=line.rank,
        generation=line.generation,
        name=str(found.get("name")),
        t=int_of(found, "t", where),
        epoch=int_of(found, "epoch", where) if to is None else to,
        phase=text_of(found.get("phase")),
        fields=found,
    )


def _memory(line: LogLine) -> MemoryLine:
    found, where = line.fields, line.where
    numbers = {name: int_of(found, name, where) for name in _MEMORY}
    return MemoryLine(rank=line.rank, generation=line.generation, **numbers)


def _ledgers(line: LogLine) -> list[Ledger]:
    """Tables in one line (``streams``, ``total``, ``envelopes``), or one line per stream."""
    found = line.fields
    tables = dict(mapping_of(found.get("streams")))
    tables |= {name: found[name] for name in (TOTAL, ENVELOPES) if name in found}
    if not tables:
        tables = {str(found.get("stream") or TOTAL): found}
    return [_ledger(name, mapping_of(table), line.where) for name, table in tables.items()]


def _ledger(name: str, table: Json, where: str) -> Ledger:
    dropped = mapping_of(table.get("dropped"))
    return Ledger(
        stream=shown(name),
        received=int_of(table, "received", where) or 0,
        used=int_of(table, "used", where) or 0,
        in_flight=int_of(table, "in_flight", where) or 0,
        dropped={shown(reason): int_of(dropped, reason, where) or 0 for reason in dropped},
        holes=int_of(table, "holes", where),
        longest_hole_ns=int_of(table, "longest_hole_ns", where),
        targets=int_of(table, "targets", where),
        invalid=int_of(table, "invalid", where),
    )


def _requests(line: LogLine) -> RobotRequests:
    found, where = line.fields, line.where
    wire, robot = (shown(str(found.get(name) or "?")) for name in ("wire", "robot"))
    counts = {name: int_of(found, name, where) or 0 for name in _REQUEST_COUNTS}
    errors, bins = mapping_of(found.get("errors")), mapping_of(found.get("bins"))
    return RobotRequests(
        wire,
        robot,
        errors={shown(reason): int_of(errors, reason, where) or 0 for reason in errors},
        bins={int(at): n for at in bins if at in _BINS and (n := int_of(bins, at, where) or 0) > 0},
        **counts,
    )


def _rule_counts(table: Json, where: str) -> RuleCounts:
    refused = mapping_of(table.get("refused"))
    chunks, clipped_chunks, clipped_values = (
        int_of(table, name, where) or 0 for name in RuleCounts._fields[:-1]
    )
    by_rule = {rule: int_of(refused, rule, where) or 0 for rule in refused}
    return RuleCounts(chunks, clipped_chunks, clipped_values, by_rule)


def _lease_ns(ends: object, expiries: object) -> int | None:
    """Robot-clock difference, so it is a duration; rows without a robot carry zeros."""
    pairs = zip(
        ends if isinstance(ends, list) else [ends],
        expiries if isinstance(expiries, list) else [expiries],
        strict=False,
    )
    leases = [b - a for a, b in pairs if isinstance(a, int) and isinstance(b, int) and b > a]
    return min(leases, default=None)


def _input_ages_ns(value: object) -> Mapping[str, int] | None:
    """By stream; of several rows the oldest, rows without a robot left out."""
    if not isinstance(value, Mapping):
        return None
    ages = {}
    for stream, age in value.items():
        if isinstance(age, list):
            age = max((a for a in age if type(a) is int), default=None)
        if type(age) is int:
            ages[sys.intern(str(stream))] = age
    return ages
