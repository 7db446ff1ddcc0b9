"""What a run in attribution mode found: shares of A, of B's named blocks and of C, as text.

Its times were taken with a wait at both ends of each block, so shares hold and the period does not;
the perturbation says by how much. Standard library only: ``python -m ppstream.block_report RUN``.
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
LABEL: Final = "attribution mode: for shares only; no gate accepts this run, and no row compares it"


class Timed(NamedTuple):
    """Durations of one stage or block, one for each envelope."""

    name: str
    depth: int
    values_ns: list[int]

    @property
    def total_ns(self) -> int:
        return sum(self.values_ns)


def report(directory: Path) -> str | None:
    """The table of the run's newest generation; None when it was not in attribution mode.

    Raises:
        OSError: the folder has no log of rank 0.
    """
    lines = list(_lines(directory))
    envelopes = [
        fields
        for rank, fields in lines
        if rank == 0 and fields.get("kind") == "envelope" and fields.get("mode") == "attribution"
    ]
    if not envelopes:
        return None
    blocks: dict[str, list[int]] = defaultdict(list)
    for _, fields in lines:
        if fields.get("kind") == "blocks":
            for name, took_ns in fields["blocks"].items():
                blocks[name].append(took_ns)
    stages = {name: _stage_ns(envelopes, name) for name in "ABC"}
    rows = [Timed("A", 0, stages["A"]), Timed("B", 0, stages["B"])]
    rows += _block_rows(blocks, sum(stages["B"]))
    rows.append(Timed("C", 0, stages["C"]))
    events = [f for _, f in lines if f.get("name") == "attribution"]
    return "\n".join(_text(rows, events[-1] if events else {}))


def _stage_ns(envelopes: Iterable[Mapping[str, Any]], stage: str) -> list[int]:
    found = []
    for e in envelopes:
        if stage == "B":
            took_ns = e.get("B_ns")
        else:
            begin, end = ("tA0", "tA1") if stage == "A" else ("tDecode", "tEmit")
            took_ns = e[end] - e[begin] if begin in e and end in e else None
        if took_ns is not None:
            found.append(took_ns)
    return found


def _block_rows(blocks: Mapping[str, list[int]], b_ns: int) -> Iterator[Timed]:
    """Blocks below their outer ones, and what no block names."""
    for name in blocks:
        yield Timed(name, 1 + name.count("/"), blocks[name])
    if blocks:
        named_ns = sum(sum(values) for name, values in blocks.items() if "/" not in name)
        yield Timed("(in no block)", 1, [max(0, b_ns - named_ns)])


def _text(rows: Sequence[Timed], said: Mapping[str, Any]) -> Iterator[str]:
    yield f"ATTRIBUTION   {LABEL}"
    if said:
        period_ms, before_ms = said["period_ns"] * MS, said["throughput_period_ns"] * MS
        yield (
            f"perturbation  {said['perturbation']:.3f} x: period {period_ms:.3g} ms attributed, "
            f"{before_ms:.3g} ms in throughput mode"
        )
    whole_ns = sum(row.total_ns for row in rows if row.depth == 0) or 1
    yield f"{'':28} {'calls':>6} {'mean ms':>9} {'p50':>9} {'p99':>9} {'share':>7}"
    for row in rows:
        name = "  " * row.depth + row.name.rpartition("/")[2]
        share = f"{row.total_ns / whole_ns:7.1%}"
        if row.name == "(in no block)" or not row.values_ns:
            yield f"{name:28} {'':6} {'':9} {'':9} {'':9} {share}"
            continue
        ordered = sorted(row.values_ns)
        numbers = (fmean(ordered), _at(ordered, 50), _at(ordered, 99))
        shown = " ".join(f"{value * MS:9.3f}" for value in numbers)
        yield f"{name:28} {len(ordered):6} {shown} {share}"


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
        print("usage: python -m ppstream.block_report LOGS/RUN", file=sys.stderr)
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
