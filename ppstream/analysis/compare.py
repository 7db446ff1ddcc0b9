"""Is B faster than A? Two runs, or two sets of runs, with an interval; refused where unfair. Pure.

The interval is a moving-block bootstrap within the runs. With several runs a side it also resamples
the runs, because two runs of the same thing differ by more than their envelopes do; with one run a
side it cannot know that, and says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, NamedTuple

from ppstream.analysis.bootstrap import BLOCK, RESAMPLES, SEED, TAIL, Row, block_length, block_sums
from ppstream.analysis.json_values import mapping_of
from ppstream.analysis.records import Json, RunLog
from ppstream.analysis.run_report import DIGITS, RunReport
from ppstream.analysis.scores import between
from ppstream.analysis.segments import JudgedSpan
from ppstream.core.errors import CompareError

#: Parts of the configuration that make it another workload: nothing fair can be said across them.
WORKLOAD: Final = (
    *("streams", "window", "actions", "batch", "decode", "simulate"),
    *("policy.target", "policy.weights", "policy.options"),
    *("bringup.source", "bringup.recording"),  # how the judged stretch was fed
)
#: Parts that never matter: names, places and limits.
ASIDE: Final = ("name", "log", "liveness", "service", "demo", "bringup", "gateway")
#: Two machines of one kind, or one after an update, may be compared; it is said, though.
SOFT_HARDWARE: Final = ("host", "kernel")
FILES: Final = ("policy.weights", "bringup.recording")  # where a file lies is no difference
DIGEST: Final = "sha256 of weights"  # where both sides have it, the file's name is none either

SEVERAL: Final = 3  # runs a side from which an interval can cover more than one start
REFUSALS_MAX: Final = 12  # lines of a refusal; more of them say no more
#: Means per envelope: the place of each in a row of ``_rows``.
QUANTITIES: Final = {"period": 1, "latency": 2, "age on rank 0": 3}

Run = Sequence[Sequence[Row]]  # one list of rows per segment


@dataclass(frozen=True, slots=True)
class Side:
    """One side: judged runs, each with its log."""

    name: str
    runs: tuple[tuple[RunLog, RunReport], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """``B / A - 1`` of one quantity, with its 95 % interval; the values are in ms."""

    name: str
    a: float
    b: float
    change: float
    low: float
    high: float

    @property
    def is_shown(self) -> bool:
        """The interval leaves zero out."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides beside each other; ``knobs`` is what was set differently, as it should be."""

    a: Side
    b: Side
    differences: tuple[Difference, ...]
    knobs: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One sentence on the period."""
        d = self.differences[0]
        half = (d.high - d.low) / 2
        if not d.is_shown:
            return (
                f"no difference in the period is visible in these runs: "
                f"{-d.change:+.1%} ± {half:.1%} faster"
            )
        word = "faster" if d.change < 0 else "slower"
        return f"{self.b.name} is {abs(d.change):.1%} ± {half:.1%} {word} than {self.a.name}"


def compare(a: Side, b: Side) -> Comparison:
    """Both sides' period, latency and age.

    Raises:
        CompareError: the workload, the hardware or the judged phase differ, or a log cannot be
            believed; names every difference.
    """
    refusals = [*_unusable(a), *_unusable(b)] or list(_unfair(a, b))
    if refusals:
        raise CompareError(_refusal(refusals))
    rows = [[_rows(report.window) for _, report in side.runs] for side in (a, b)]
    every = [row for side in rows for run in side for part in run for row in part]
    known = {n: at for n, at in QUANTITIES.items() if at == 1 or all(row[at] > 0 for row in every)}
    found = _differences_of(known, *rows)
    return Comparison(a, b, tuple(found), tuple(_knobs(a, b)))


def _refusal(differences: Sequence[str]) -> str:
    lines = [f"  {text}" for text in differences[:REFUSALS_MAX]]
    if len(differences) > REFUSALS_MAX:
        lines.append(f"  and {len(differences) - REFUSALS_MAX} more")
    return "\n".join(["these runs cannot be compared:", *lines])


def _unusable(side: Side) -> Iterator[str]:
    for _, report in side.runs:
        untrue = ("BAD_INSTRUMENT", "CONTRADICTED", "PERTURBED")
        broken = [reason for reason in report.reasons if reason in untrue]
        if broken:
            yield f"{side.name}: run {report.run_id} is {', '.join(broken)}: its times are wrong"
        elif report.window.n < BLOCK:
            yield f"{side.name}: run {report.run_id} has {report.window.n} periods, needs {BLOCK}"
        elif report.window.span_ns <= 0:
            yield f"{side.name}: run {report.run_id} has equal stamps: no time passes in it"


def _unfair(a: Side, b: Side) -> Iterator[str]:
    """Yields what differs and must not, within a side and across both."""
    first = _matters(*a.runs[0])
    for side in (a, b):
        for run, report in side.runs:
            for key, mine, theirs in _changed(_settings(side.runs[0][0]), _settings(run)):
                yield f"{key}: {mine!r} and {theirs!r} within {side.name}"
            for key, mine, theirs in _apart(first, _matters(run, report)):
                yield f"{key}: {mine!r} in {a.name}, {theirs!r} in {side.name} ({report.run_id})"


def _matters(run: RunLog, report: RunReport) -> dict[str, object]:
    """Hardware, workload, and how the judged envelopes were fed."""
    kept = {k: v for k, v in _flat(run.config).items() if _is_within(k, WORKLOAD)}
    kept |= {k: str(kept[k]).rpartition("/")[2] for k in FILES if k in kept}
    kept |= {k: v for k, v in _hardware(run).items() if k.rpartition(".")[2] not in SOFT_HARDWARE}
    kept[DIGEST] = str(run.manifest.get("weights_sha256") or "")[:DIGITS]
    kept["world size"] = run.topology.world_size
    kept["judged phase"] = ", ".join(sorted(str(phase) for phase in report.window.phases))
    kept["pacing"] = ", ".join(sorted({str(e.pacing) for e in report.window.emitted}))
    return kept


def _apart(a: Json, b: Json) -> Iterator[tuple[str, object, object]]:
    """Yields what matters and differs; of the weights the name counts where a digest is missing."""
    aside = FILES[0] if a[DIGEST] and b[DIGEST] else DIGEST
    return (found for found in _changed(a, b) if found[0] != aside)


def _is_within(key: str, parts: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{part}.") for part in parts)


def _hardware(run: RunLog) -> dict[str, object]:
    """Machines, and the device of each rank."""
    found = _flat(mapping_of(run.manifest.get("hardware")), "hardware.")
    ranks = mapping_of(run.manifest.get("topology")).get("ranks")
    for place, rank in enumerate(ranks if isinstance(ranks, list) else []):
        if isinstance(rank, Mapping):
            found[f"device of rank {place}"] = rank.get("device")
    return found


def _knobs(a: Side, b: Side) -> Iterator[str]:
    """Returns what was set differently on purpose: shape, links, versions."""
    (first, one), (second, two) = a.runs[0], b.runs[0]
    both = _matters(first, one), _matters(second, two)
    newer = [found for found in _differences(*both) if _is_newer(found[0], *both)]
    for key, mine, theirs in [*_differences(_settings(first), _settings(second)), *newer]:
        yield f"{key} {mine} → {theirs}"


def _settings(run: RunLog) -> dict[str, object]:
    aside = (*WORKLOAD, *ASIDE)
    kept = {k: v for k, v in _flat(run.config).items() if not _is_within(k, aside)}
    kept |= {k: v for k, v in _hardware(run).items() if k.rpartition(".")[2] in SOFT_HARDWARE}
    versions = mapping_of(run.manifest.get("versions"))
    kept |= {f"version of {name}": value for name, value in versions.items()}
    return kept | {"native": run.manifest.get("native")}


def _differences(a: Json, b: Json) -> Iterator[tuple[str, object, object]]:
    for key in [*a, *(k for k in b if k not in a)]:
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


def _changed(a: Json, b: Json) -> Iterator[tuple[str, object, object]]:
    return (found for found in _differences(a, b) if not _is_newer(found[0], a, b))


def _is_newer(key: str, a: Json, b: Json) -> bool:
    """A setting that one side's version did not know yet. Options are the user's: they count."""
    if key.startswith("hardware."):
        return False
    table = key.rpartition(".")[0]
    known = table and all(any(k.startswith(f"{table}.") for k in side) for side in (a, b))
    return bool(known) and (key in a) != (key in b) and ".options" not in key


def _flat(table: Json, prefix: str = "") -> dict[str, object]:
    """Nested tables and lists as dotted names."""
    found: dict[str, object] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            found |= _flat({str(i): item for i, item in enumerate(value)}, f"{name}.")
        else:
            found[name] = value
    return found


# ---- numbers ------------------------------------------------------------------------------------


def _rows(window: JudgedSpan) -> list[list[Row]]:
    """By segment and emit: 1, period, latency, age since arrival; in ns."""
    return [
        [
            (1, period_ns, between(e.tA0, e.picked), e.age_rank0_ns or 0)
            for e, period_ns in zip(segment.emitted[1:], segment.periods_ns, strict=True)
        ]
        for segment in window.segments
    ]


def _differences_of(
    quantities: Mapping[str, int], a: Sequence[Run], b: Sequence[Run]
) -> Iterator[Difference]:
    """Of each quantity, by its place in a row; all of them from the same resamples."""
    source = random.Random(SEED)
    blocks = [[_blocks(run) for run in side] for side in (b, a)]
    drawn = [[_resampled(side, source) for side in blocks] for _ in range(RESAMPLES)]
    whole = [_total([row for run in side for part in run for row in part]) for side in (a, b)]
    wider = _wider(len(a), len(b))
    for name, at in quantities.items():
        changes = sorted((b[at] / b[0]) / (a[at] / a[0]) - 1 for b, a in drawn)
        last = len(changes) - 1
        low, high = changes[round(TAIL * last)], changes[round((1 - TAIL) * last)]
        first, second = (row[at] / row[0] for row in whole)
        change = second / first - 1
        low, high = (_widened(end, change, wider) for end in (low, high))
        yield Difference(name, first / 1e6, second / 1e6, change, low, high)


def _widened(end: float, change: float, wider: float) -> float:
    """An end of the interval around ``change``, by ratios: no quantity falls by over 100 %."""
    return (1 + change) * math.pow((1 + end) / (1 + change), wider) - 1


def _wider(a: int, b: int) -> float:
    """By this factor resamples of so few runs a side scatter too little for a 95 % interval.

    Their spread is that of ``k`` runs, not of ``k - 1``, and Student's t is wider than the normal.
    """
    k, df = min(a, b), a + b - 2
    if k < SEVERAL:
        return 1.0
    z = NormalDist().inv_cdf(1 - TAIL)
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    return t / z * math.sqrt(k / (k - 1))


class _Blocks(NamedTuple):
    """Sums of all blocks of one run, and how many of them make up a run of its length."""

    sums: list[Row]
    draws: int


def _blocks(run: Run) -> _Blocks:
    n = sum(map(len, run))
    length = block_length(n)
    return _Blocks([sums for part in run for sums in block_sums(part, length)], -(-n // length))


def _resampled(runs: Sequence[_Blocks], source: random.Random) -> Row:
    """Sums of one resample: runs first, then as many blocks of each as it is long."""
    picked = source.choices(runs, k=len(runs)) if len(runs) >= SEVERAL else runs
    return _total([row for run in picked for row in source.choices(run.sums, k=run.draws)])


def _total(rows: Sequence[Row]) -> Row:
    return tuple(map(sum, zip(*rows, strict=True)))
