"""Report of a run in attribution mode: shares of A, of B's named blocks and of C, as text.

Its times were taken with a wait at both ends of each block, so shares hold and the period does not;
the perturbation says by how much. Standard library only: ``python -m ppstream.report.attribution
RUN``.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

MS: Final = 1e-6  # per ns
UNNAMED: Final = "(in no block)"
LABEL: Final = "attribution mode: for shares only; no gate accepts this run, and no row compares it"
ON_DEVICE: Final = (
    "A and C are times between events of their own streams, which nobody waits for; what the host "
    "does in C is not in it. B includes what its blocks' waits cost"
)


class Timed(NamedTuple):
    """Durations of one stage or block, in those of ``envelopes`` that had any."""

    name: str
    depth: int
    values_ns: list[int]
    envelopes: int

    @property
    def each_ns(self) -> float:
        """Of an envelope on average, whether it had any or not."""
        return sum(self.values_ns) / self.envelopes if self.envelopes else 0.0


def report(directory: Path) -> str | None:
    """The table of the run's newest generation; None when it was not in attribution mode.

    Raises:
        OSError: the folder has no log of rank 0.
    """
    lines = list(_lines(directory))
    envelopes, policy = (
        [
            fields
            for _, fields in lines
            if fields.get("kind") == kind and fields.get("mode") == "attribution"
        ]
        for kind in ("envelope", "stage1")
    )
    if not envelopes:
        return None
    # on a device-ordered link the policy rank alone knows how long B took
    b_ns = _present(envelopes, "B_ns") or _present(policy, "eB_ns")
    blocks = [(rank, fields["blocks"]) for rank, fields in lines if fields.get("kind") == "blocks"]
    policy_rank = max(rank for rank, _ in lines)
    in_b = [found for rank, found in blocks if rank == policy_rank]
    in_c = [found for rank, found in blocks if rank != policy_rank]
    rows = [
        _stage("A", _between(envelopes, "tA0", "tA1")),
        *_with_blocks(_stage("B", b_ns), in_b),
        *_with_blocks(_stage("C", _between(envelopes, "tDecode", "tEmit")), in_c),
    ]
    events = [f for _, f in lines if f.get("name") == "attribution"]
    is_on_device = bool(_present(envelopes, "eA_ns"))
    return "\n".join(_text(rows, events[-1] if events else {}, is_on_device=is_on_device))


def _present(records: Iterable[Mapping[str, Any]], field: str) -> list[int]:
    return [record[field] for record in records if record.get(field) is not None]


def _between(records: Iterable[Mapping[str, Any]], begin: str, end: str) -> list[int]:
    return [e[end] - e[begin] for e in records if begin in e and end in e]


def _stage(name: str, values_ns: list[int]) -> Timed:
    return Timed(name, 0, values_ns, len(values_ns))


def _with_blocks(stage: Timed, blocks: Sequence[Mapping[str, int]]) -> Iterator[Timed]:
    """A stage, its blocks below their outer ones, and what no block names.

    A policy rank begins with its blocks some envelopes late: they are averaged over their own.
    """
    yield stage
    values: dict[str, list[int]] = defaultdict(list)
    for found in blocks:
        for name, took_ns in found.items():
            values[name].append(took_ns)
    rows = [Timed(name, 1 + name.count("/"), v, len(blocks)) for name, v in values.items()]
    yield from rows
    if rows:
        named_ns = sum(row.each_ns for row in rows if row.depth == 1)
        yield Timed(UNNAMED, 1, [max(0, round(stage.each_ns - named_ns))], 1)


def _text(rows: Sequence[Timed], said: Mapping[str, Any], *, is_on_device: bool) -> Iterator[str]:
    yield f"ATTRIBUTION   {LABEL}"
    if said:
        period_ms, before_ms = said["period_ns"] * MS, said["throughput_period_ns"] * MS
        yield (
            f"perturbation  {said['perturbation']:.3f} x: period {period_ms:.3g} ms attributed, "
            f"{before_ms:.3g} ms in throughput mode"
        )
    whole_ns = sum(row.each_ns for row in rows if row.depth == 0) or 1
    yield f"{'':28} {'calls':>6} {'mean ms':>9} {'p50':>9} {'p99':>9} {'share':>7}"
    for row in rows:
        name = "  " * row.depth + row.name.rpartition("/")[2]
        share = f"{row.each_ns / whole_ns:7.1%}"
        if row.name == UNNAMED or not row.values_ns:
            yield f"{name:28} {'':6} {'':9} {'':9} {'':9} {share}"
            continue
        ordered = sorted(row.values_ns)
        numbers = (fmean(ordered), _at(ordered, 50), _at(ordered, 99))
        shown = " ".join(f"{value * MS:9.3f}" for value in numbers)
        yield f"{name:28} {len(ordered):6} {shown} {share}"
    if is_on_device:
        yield ON_DEVICE


def _at(ordered: Sequence[int], percent: int) -> int:
    return ordered[-(-percent * len(ordered) // 100) - 1]


def _lines(directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rank and fields of every whole line of the newest generation."""
    files: dict[int, tuple[int, Path]] = {}
    for path in sorted(directory.glob("rank*.gen*.jsonl")):
        rank, generation = (int(part[len(word) :]) for part, word in _parts(path.name))
        files[rank] = max(files.get(rank, (generation, path)), (generation, path))
    if 0 not in files:
        raise FileNotFoundError(f"{directory} has no log of rank 0")
    for rank, (_, path) in files.items():
        for line in path.read_text().splitlines():
            if (fields := _decoded(line)) is not None:
                yield rank, fields


def _decoded(line: str) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = json.loads(line)
    except ValueError:  # the torn last line of a rank that was killed
        return None
    return fields


def _parts(name: str) -> Iterator[tuple[str, str]]:
    rank, generation, _ = name.split(".")
    yield from ((rank, "rank"), (generation, "gen"))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if len(arguments) != 1:
        print("usage: python -m ppstream.report.attribution LOGS/RUN", file=sys.stderr)
        return 3
    try:
        found = report(Path(arguments[0]))
    except OSError as error:
        print(error, file=sys.stderr)
        return 3
    print(found or 'this run was not in attribution mode: start one with --set mode="attribution"')
    return 0 if found else 2


if __name__ == "__main__":
    sys.exit(main())
