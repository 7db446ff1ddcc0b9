"""Complete run logs from the recurrence: every stamp, wait, counter and integral, exactly known.

Times are milliseconds at the surface and integer nanoseconds inside. ``GoldenRun.lines`` may be
bent afterwards into the logs of a writer that stamps wrongly.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ppstream.analysis.log_parser import LogLine, parse_run
from ppstream.analysis.period_model import (
    ModelledRun,
    PipelineForm,
    PlaceRun,
    StageTimes,
    recurrence,
)
from ppstream.analysis.records import RunLog

MS = 1_000_000
POLICY_CLOCK_NS = 7_000_000_000_000  # the policy rank's clock is another one
START_NS = 1_000_000_000
TAIL = 8  # envelopes simulated and not logged

Fields = dict[str, Any]
ALL = slice(None)


@dataclass
class GoldenRun:
    """One run's files, still as dictionaries."""

    manifest: Fields
    lines: list[Fields]  # rank 0
    policy_lines: list[Fields]  # rank 1
    generation: int = 0
    extra: list[Fields] = field(default_factory=list)  # events, ledger, robot
    behind: list[list[Fields]] = field(default_factory=list)  # the ranks behind rank 1

    def book(self) -> Fields:
        """The ledger of envelopes that rank 0 writes at the end; ``extra`` may have another."""
        dropped = [line["drop"] for line in self.lines if line.get("drop") is not None]
        reasons = {reason: dropped.count(reason) for reason in dropped}
        used = len(self.lines) - len(dropped)
        envelopes = {"received": len(self.lines), "used": used, "dropped": reasons, "in_flight": 0}
        last_ns = max((line.get("tEmit") or 0 for line in self.lines), default=0)
        return {"kind": "ledger", "t": last_ns, "envelopes": envelopes}

    def parse(self) -> RunLog:
        return parse_run(self.manifest, self.tagged())

    def tagged(self) -> Iterator[LogLine]:
        for rank, lines in enumerate((self.rank0(), *map(self._all_named, self.policies))):
            for i, fields in enumerate(lines):
                yield LogLine(rank, self.generation, f"rank{rank}:{i + 1}", fields)

    def rank0(self) -> list[Fields]:
        """All lines of rank 0's file."""
        booked = any("envelopes" in line for line in self.extra)
        book = [] if booked or not self.lines else [self.book()]
        return [self._named(line) for line in self.lines + self.extra + book]

    @property
    def policies(self) -> list[list[Fields]]:
        """Lines of each policy rank."""
        return [self.policy_lines, *self.behind]

    @property
    def stamped(self) -> list[list[Fields]]:
        """Lines of every rank."""
        return [self.lines, *self.policies]

    def _all_named(self, lines: list[Fields]) -> list[Fields]:
        return [self._named(line) for line in lines]

    def _named(self, line: Fields) -> Fields:
        """Of this run, unless it says another."""
        return {"run_id": self.manifest["run_id"]} | line

    def bend(self, change: Callable[[Fields], object]) -> GoldenRun:
        """Change rank 0's lines in place, as a writer with a fault would have written them."""
        for line in self.lines:
            change(line)
        return self

    def put(self, rank: int = 0, at: slice = ALL, **values: Any) -> GoldenRun:
        """Set these fields of a rank's lines; a function is given the line."""
        for line in self.stamped[rank][at]:
            line |= {k: v(line) if callable(v) else v for k, v in values.items()}
        return self

    def add(self, rank: int = 0, at: slice = ALL, **by_ms: float) -> GoldenRun:
        """Add milliseconds to these fields of a rank's lines."""
        for line in self.stamped[rank][at]:
            line |= {k: (line.get(k) or 0) + ms(v) for k, v in by_ms.items()}
        return self

    def later(self, by_ms: float, at: slice = ALL) -> GoldenRun:
        """Move all stamps of every rank's lines."""
        for line in (line for lines in self.stamped for line in lines[at]):
            line |= {k: v + ms(by_ms) for k, v in line.items() if k[0] == "t" and k[1].isupper()}
        return self

    def lose(self, *names: str, rank: int = 0, at: slice = ALL) -> GoldenRun:
        """Take these fields out of a rank's lines; without names the lines themselves."""
        lines = self.stamped[rank]
        for line in lines[at]:
            for name in names:
                del line[name]
        if not names:
            del lines[at]
        return self

    def tell(self, *lines: Fields) -> GoldenRun:
        """Append other lines to rank 0's file."""
        self.extra += lines
        return self

    def set(self, path: str, value: object) -> GoldenRun:
        """Set what run.json has at this path."""
        *tables, key = path.split(".")
        table: Any = self.manifest
        for name in tables:
            table = table[int(name)] if isinstance(table, list) else table.setdefault(name, {})
        table[key] = value
        return self

    def write(self, folder: Path, *, policy_file: bool = True) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(self.manifest))
        write_lines(folder / f"rank0.gen{self.generation}.jsonl", self.rank0())
        for rank, lines in enumerate(self.policies if policy_file else (), start=1):
            if lines or not self.behind:  # of a chain a rank without lines has no file
                path = folder / f"rank{rank}.gen{self.generation}.jsonl"
                write_lines(path, self._all_named(lines))
        return folder


def write_lines(path: Path, lines: Sequence[Fields]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ms(value: float) -> int:
    return round(value * MS)


def stages(
    a: float = 4, b: float = 10, c: float = 5, x: float = 0.5, t_in: float = 0
) -> StageTimes:
    """Constant stage times in ms, as the golden cases name them."""
    return StageTimes(ms(a), ms(b), ms(c), ms(x), ms(x), ms(t_in))


def chain(
    *places: float, a: float = 4, c: float = 1, x: float | Sequence[float] = 0.2, t_in: float = 0
) -> StageTimes:
    """A chain of policy ranks, in ms; ``x`` is every hop, or one after the other."""
    hops = [x] * (len(places) + 1) if isinstance(x, int | float) else x
    return StageTimes.of_chain(ms(a), list(map(ms, places)), ms(c), list(map(ms, hops)), ms(t_in))


def jittered(times: StageTimes, n: int, seed: int, spread: float = 0.3) -> list[StageTimes]:
    """``n`` draws, every stage uniform within ``spread`` of its mean."""
    source = random.Random(seed)

    def draw(mean: float) -> int:
        return round(mean * source.uniform(1 - spread, 1 + spread))

    hops = [int(x) for x in times.hops]
    return [
        StageTimes.of_chain(draw(times.a), list(map(draw, times.places)), draw(times.c), hops)
        for _ in range(n + TAIL)
    ]


def simulate(
    times: StageTimes | Sequence[StageTimes] | None = None,
    form: PipelineForm | None = None,
    *,
    n: int = 330,
    emit_block_ms: float = 0,
    **ids: Any,
) -> GoldenRun:
    """Run the recurrence and log it completely.

    Args:
        times: constant stage times, or one per envelope (the last ``TAIL`` are not logged);
            ``emit_block_ms`` of C is a wait.
        form: the pipeline's form; default serial, send first, 2/2.
        n: envelopes when ``times`` is constant.
        emit_block_ms: what the consumer holds each emit up; added to C.
        ids: fields of every line, such as ``phase`` or ``epoch``.
    """
    times = times or stages()
    each = [times] * (n + TAIL) if isinstance(times, StageTimes) else list(times)
    known = _simulated(tuple(each), form or PipelineForm(), ms(emit_block_ms), tuple(ids.items()))
    lines, *policies = ([line.copy() for line in lines] for lines in known.stamped)
    return GoldenRun(deepcopy(known.manifest), lines, policies[0], behind=policies[1:])


@lru_cache(maxsize=64)
def _simulated(
    each: tuple[StageTimes, ...], form: PipelineForm, block: int, given: tuple[tuple[str, Any], ...]
) -> GoldenRun:
    """What ``simulate`` hands out copies of: many cases bend the same run."""
    ids = dict(given)
    slowed = [replace(t, c=t.c + block) for t in each]
    z = recurrence(slowed, form)
    ids = {"generation": 0, "epoch": 0, "lane": 0, "mode": "throughput"} | ids
    pacing = "free" if any(t.t_in for t in each) else "saturated"
    ids = {"phase": "bring-up", "pacing": pacing} | ids
    counters = _Counters(z)
    is_chain = len(z.places) > 1
    clock_ns = START_NS if is_chain else POLICY_CLOCK_NS
    lines: list[Fields] = []
    policies: list[list[Fields]] = [[] for _ in range(len(z.places) * form.replicas)]
    for k in range(len(each) - TAIL):  # the run goes on behind the log's last line
        waits = _waits(z, k, form, each[k])
        stamps = {
            name: START_NS + int(instants[k])
            for name, instants in (
                ("tA0", z.a0),
                ("tA1", z.a1),
                ("tSend", z.s0),
                ("tRecv", z.o1),
                ("tDecode", z.c0),
                ("tEmit", z.c1),
            )
        }
        # a chain's place hands its output to a hop that waits for itself
        r = form.replicas
        stays = [_stay(place, k, place.b1 if is_chain else place.o0, r) for place in z.places]
        shared = stays[-1] | {"residence_ns": sum(stay["residence_ns"] for stay in stays)}
        b_ns = max(int(place.b1[k] - place.b0[k]) for place in z.places)
        rx = int(each[k].t_in) * k if each[k].t_in else int(z.a0[k])
        rank0 = {"kind": "envelope", "seq": k} | ids | stamps | waits | shared | counters.at(k)
        rank0 |= {"B_ns": b_ns, "w_emit_ns": block, "busy_link_ns": 0}
        rank0 |= {"tRx": START_NS + rx, "drop": None}
        rank0 |= {"age_rank0_ns": stamps["tEmit"] - START_NS - rx}
        rank0 |= {"cpu_a_ns": int(each[k].a), "cpu_c_ns": int(each[k].c), "run_delay_ns": 0}
        if r > 1:
            rank0["replica"] = k % r + 1
        lines.append(rank0)
        theirs = policies if r == 1 else [policies[k % r]]
        for place, stay, policy_lines in zip(z.places, stays, theirs, strict=True):
            policy = {"kind": "stage1", "seq": k, "busy_link_ns": 0} | ids | stay
            policy |= {"cpu_b_ns": int(place.b1[k] - place.b0[k]), "run_delay_ns": 0}
            policy |= {"tB0": clock_ns + int(place.b0[k]), "tB1": clock_ns + int(place.b1[k])}
            policy_lines.append(policy)
    about = manifest(form, world_size=1 + len(policies))
    about["standalone"] = standalone(each, form.replicas)
    if is_chain:
        for rank, table in enumerate(about["topology"]["ranks"]):
            parts = [f"part_{rank}"] if rank else []
            table |= {"boot_id": "here", "device": "cpu", "parts": parts}
    if form.replicas > 1:
        for rank, table in enumerate(about["topology"]["ranks"]):
            table |= {"device": "cpu", "parts": ["policy"] if rank else []}
    return GoldenRun(about, lines, policies[0], behind=policies[1:])


def _stay(place: PlaceRun, k: int, left: Sequence[float], replicas: int) -> Fields:
    """What one policy rank says of one envelope besides its stamps of B."""
    before = k - replicas
    gap = int(place.b0[k] - _at(place.b1, before)) if before >= 0 else int(place.b0[k])
    waits = {"wait_input_ns": gap, "wait_output_ns": 0, "idle_ns": gap if before >= 0 else None}
    return waits | {"residence_ns": int(left[k] - place.i1[k])}


def standalone(times: Sequence[StageTimes], replicas: int = 1) -> Fields:
    """An honest measurement of these stages with nothing beside them."""
    places_ns = [round(fmean(b)) for b in zip(*(t.places for t in times), strict=True)]
    means = {"A": fmean(t.a for t in times), "B": max(places_ns), "C": fmean(t.c for t in times)}
    each = [round(fmean(t.b for t in times[k::replicas])) for k in range(replicas)]
    found: Fields = {f"{stage}_ns": round(ns) for stage, ns in means.items()}
    found |= {"replicas_ns": each} if replicas > 1 else {}
    return found | ({"places_ns": places_ns} if len(places_ns) > 1 else {})


def period_17() -> GoldenRun:
    """A 5, C 5, B 10 every 17 ms on one thread: each result comes 12 ms into a cycle."""
    golden = simulate(stages(a=5, b=10, c=5, x=0.5), PipelineForm())
    start_ns, total_ns = 1_000 * MS, {"outstanding_ns_total": 0, "q_decode_ns_total": 0}
    for k, (line, policy) in enumerate(zip(golden.lines, golden.policy_lines, strict=True)):
        a0 = start_ns + k * ms(17)
        line |= {"tRx": a0, "tA0": a0, "tA1": a0 + ms(5), "tSend": a0 + ms(5)}
        line |= {"tRecv": a0 + ms(29), "tDecode": a0 + ms(29), "tEmit": a0 + ms(34)}
        line |= {"w_credit_ns": 0, "w_slot_ns": 0, "w_result_ns": ms(7), "residence_ns": ms(10)}
        line |= {"wait_input_ns": ms(7), "idle_ns": ms(7), "outstanding": 1, "outstanding_max": 2}
        total_ns["outstanding_ns_total"] += ms(24)
        line |= total_ns
        b0 = k * ms(17)
        policy |= {"tB0": b0, "tB1": b0 + ms(10), "wait_input_ns": ms(7), "residence_ns": ms(10)}
    return golden


def manifest(form: PipelineForm, *, world_size: int = 2) -> Fields:
    return {
        "schema": "ppstream.log/1",
        "run_id": "golden",
        "created_utc": "2025-01-01T00:00:00Z",
        "finished_utc": None,
        "config": {},
        "topology": {
            "threads": form.threads,
            "order": form.order,
            "credit": form.credit,
            "pacing": "saturated",
            "replicas": form.replicas,
            "world_size": world_size,
            "d_in": form.d_in,
            "d_out": form.d_out,
            "ranks": [{"rank": rank, "stamp_source": "host"} for rank in range(world_size)],
        },
    }


def _waits(z: ModelledRun, k: int, form: PipelineForm, t: StageTimes) -> Fields:
    """What rank 0's threads waited for, each around its own blocking call."""
    arrive = k * t.t_in
    if form.threads == "split":
        before_a, before_c = _at(z.a1, k - 1), _at(z.c1, k - 1)
    elif form.is_unpipelined:
        before_a, before_c = _at(z.c1, k - 1), z.a1[k]
    else:
        tokens = form.tokens(t)
        before_a = max(_at(z.c1, k - tokens), _at(z.a1, k - 1))
        behind = k + tokens - 1  # the A that this decode stands behind
        before_c = max(z.a1[behind] if behind < len(z.a1) else 0, _at(z.c1, k - 1))
    waits = {"w_slot_ns": 0}
    if form.credit == "before_window":
        waits["w_credit_ns"] = int(max(0, _at(z.o1, k - form.d_in) - before_a))
        ready = max(before_a, _at(z.o1, k - form.d_in))
    elif form.threads == "split":  # the thread held the one before until a credit and the link came
        built, credit = _at(z.a1, k - 1), _at(z.o1, k - 1 - form.d_in)
        waits["w_credit_ns"] = int(max(0, credit - built))
        waits["w_slot_ns"] = int(_at(z.s0, k - 1) - max(credit, built))
        ready = _at(z.s0, k - 1)
    else:  # one envelope waits preflighted; the next A needs that place
        ready = max(before_a, _at(z.s0, k - 1))
        waits |= {"w_credit_ns": 0, "w_slot_ns": int(ready - before_a)}
    waits["w_input_ns"] = int(max(0, arrive - ready))
    waits["w_result_ns"] = int(max(0, z.o1[k] - before_c))
    return waits


def _at(instants: Sequence[float], k: int) -> float:
    return instants[k] if k >= 0 else 0


class _Counters:
    """Both queue counters over time, read at each emit as the runtime would."""

    def __init__(self, z: ModelledRun) -> None:
        n = len(z.a0)
        self._emits = [int(t) for t in z.c1]
        # (instant, order within the instant, step): permission returns before it is used
        self._queues = {
            "outstanding": sorted(
                [(int(z.o1[k]), 0, -1) for k in range(n)] + [(int(z.s0[k]), 1, 1) for k in range(n)]
            ),
            "q_decode": sorted(
                [(int(z.o1[k]), 0, 1) for k in range(n)] + [(int(z.c0[k]), 1, -1) for k in range(n)]
            ),
        }
        self._tables = {name: self._table(steps) for name, steps in self._queues.items()}

    @staticmethod
    def _table(steps: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """(instant, level from then on, integral up to then)."""
        table = [(0, 0, 0)]
        for instant, _, step in steps:
            before, level, integral = table[-1]
            table.append((instant, level + step, integral + level * (instant - before)))
        return table

    def at(self, k: int) -> Fields:
        found: Fields = {}
        for name, table in self._tables.items():
            i = self._index(table, self._emits[k])
            start = self._index(table, self._emits[k - 1]) if k else 0
            instant, level, integral = table[i]
            found[name] = level
            found[f"{name}_max"] = max(level for _, level, _ in table[start : i + 1])
            found[f"{name}_ns_total"] = integral + level * (self._emits[k] - instant)
        return found

    @staticmethod
    def _index(table: list[tuple[int, int, int]], instant: int) -> int:
        return bisect_right(table, instant, key=lambda row: row[0]) - 1
