"""Report of a run in attribution mode: shares of A, B and C, and of their named blocks, as text.

Its times were taken with a wait at both ends of each block, so shares hold and the period does not;
the perturbation says by how much. Standard library only: ``python -m ppstream.report.attribution
RUN``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from ppstream.analysis.log_reader import MANIFEST, log_files, read_lines, read_manifest
from ppstream.core.errors import LogError
from ppstream.core.quantiles import quantiles

MS: Final = 1e-6  # per ns
STAGES: Final = frozenset({"envelope", "stage1"})  # kinds of lines
UNNAMED: Final = "(in no block)"
LABEL: Final = "attribution mode: for shares only; no gate accepts this run, and no row compares it"
ON_DEVICE: Final = (
    "A and C are times between events of their own streams, which nobody waits for; what the host "
    "does in C is not in it. B includes what its blocks' waits cost"
)


class BlockTimes(NamedTuple):
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
    """The table of each rank's newest generation; None when it was not in attribution mode.

    Raises:
        LogError: the folder has no log of rank 0, or one that cannot be read.
    """
    lines = _newest_lines(directory)
    of_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    blocks: dict[int, list[Mapping[str, int]]] = defaultdict(list)
    for rank, fields in lines:
        if fields.get("kind") == "blocks":
            blocks[rank].append(fields["blocks"])
        elif fields.get("kind") in STAGES and fields.get("mode") == "attribution":
            of_rank[rank].append(fields)
    envelopes, policy_ranks = of_rank[0], sorted({rank for rank, _ in lines} - {0})
    if not envelopes:
        return None
    # on a device-ordered link the policy rank alone knows how long B took
    b_ns = _present(envelopes, "B_ns") or _present(of_rank[1], "eB_ns")
    stages_b = [_stage("B", b_ns)]
    if len(policy_ranks) > 1:
        stages_b = [_stage(f"B of place {rank}", _b_ns(of_rank[rank])) for rank in policy_ranks]
    front = _front_parts(directory) if policy_ranks else frozenset()
    on_rank0 = blocks.pop(0, [])
    in_a, in_c = _divided(on_rank0 if policy_ranks else [], front)
    rows = [
        *_with_blocks(_stage("A", _between(envelopes, "tA0", "tA1")), in_a),
        *chain.from_iterable(
            _with_blocks(stage, blocks[rank] if policy_ranks else on_rank0)
            for stage, rank in zip(stages_b, policy_ranks or [0], strict=True)
        ),
        *_with_blocks(_stage("C", _between(envelopes, "tDecode", "tEmit")), in_c),
    ]
    events = [f for _, f in lines if f.get("name") == "attribution"]
    is_on_device = bool(_present(envelopes, "eA_ns"))
    return "\n".join(_text(rows, events[-1] if events else {}, is_on_device=is_on_device))


def _b_ns(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Durations of B on one policy rank: on its device, or by its host's clock."""
    return _present(lines, "eB_ns") or _between(lines, "tB0", "tB1")


def _front_parts(directory: Path) -> frozenset[str]:
    """Names of the policy's parts on rank 0, whose blocks lie in A."""
    if not (directory / MANIFEST).exists():
        return frozenset()
    topology: Any = read_manifest(directory).get("topology", {})
    ranks = topology.get("ranks", [])
    return frozenset(ranks[0].get("parts", [])) if ranks else frozenset()


def _divided(
    found: Sequence[Mapping[str, int]], front: Container[str]
) -> tuple[list[Mapping[str, int]], list[Mapping[str, int]]]:
    """Rank 0's blocks: those of front parts, and those of C."""
    divided: tuple[list[Mapping[str, int]], list[Mapping[str, int]]] = [], []
    for blocks in found:
        for side, is_front in enumerate((True, False)):
            mine = {k: ns for k, ns in blocks.items() if (_outer(k) in front) == is_front}
            if mine:
                divided[side].append(mine)
    return divided


def _outer(name: str) -> str:
    return name.partition("/")[0]


def _present(records: Iterable[Mapping[str, Any]], field: str) -> list[int]:
    return [record[field] for record in records if record.get(field) is not None]


def _between(records: Iterable[Mapping[str, Any]], begin: str, end: str) -> list[int]:
    stamps = [(e.get(begin), e.get(end)) for e in records]
    return [last - first for first, last in stamps if first is not None and last is not None]


def _stage(name: str, values_ns: list[int]) -> BlockTimes:
    return BlockTimes(name, 0, values_ns, len(values_ns))


def _with_blocks(stage: BlockTimes, blocks: Sequence[Mapping[str, int]]) -> Iterator[BlockTimes]:
    """A stage, its blocks below their outer ones, and what no block names.

    A policy rank begins with its blocks some envelopes late: they are averaged over their own.
    """
    yield stage
    values: dict[str, list[int]] = defaultdict(list)
    for found in blocks:
        for name, took_ns in found.items():
            values[name].append(took_ns)
    rows = [BlockTimes(name, 1 + name.count("/"), v, len(blocks)) for name, v in values.items()]
    yield from rows
    if rows:
        named_ns = sum(row.each_ns for row in rows if row.depth == 1)
        yield BlockTimes(UNNAMED, 1, [max(0, round(stage.each_ns - named_ns))], 1)


def _text(
    rows: Sequence[BlockTimes], event: Mapping[str, Any], *, is_on_device: bool
) -> Iterator[str]:
    yield f"ATTRIBUTION   {LABEL}"
    found = [event.get(n) for n in ("perturbation", "period_ns", "throughput_period_ns")]
    told = [value for value in found if isinstance(value, int | float)]
    if len(told) == len(found):
        ratio, period_ns, before_ns = told
        yield (
            f"perturbation  {ratio:.3f} x: period {period_ns * MS:.3g} ms attributed, "
            f"{before_ns * MS:.3g} ms in throughput mode"
        )
    whole_ns = sum(row.each_ns for row in rows if row.depth == 0) or 1
    yield f"{'':28} {'calls':>6} {'mean ms':>9} {'p50':>9} {'p99':>9} {'share':>7}"
    for row in rows:
        name = "  " * row.depth + row.name.rpartition("/")[2]
        share = f"{row.each_ns / whole_ns:7.1%}"
        times = quantiles(row.values_ns)
        if row.name == UNNAMED or times is None:
            yield f"{name:28} {'':6} {'':9} {'':9} {'':9} {share}"
            continue
        p99_ns = times.reported_p99_ns
        p99 = "NA" if p99_ns is None else f"{p99_ns * MS:.3f}"
        usual = f"{fmean(row.values_ns) * MS:9.3f} {times.p50_ns * MS:9.3f}"
        yield f"{name:28} {times.count:6} {usual} {p99:>9} {share}"
    if is_on_device:
        yield ON_DEVICE


def _newest_lines(directory: Path) -> list[tuple[int, Mapping[str, Any]]]:
    """Rank and fields of every whole line of each rank's newest generation."""
    files = log_files(directory)
    newest = {name.rank: name.generation for name in sorted(files.values())}
    if 0 not in newest:
        raise LogError(f"{directory} has no log of rank 0")
    kept = {path: name for path, name in files.items() if name.generation == newest[name.rank]}
    return [(line.rank, line.fields) for line in read_lines(kept, torn=[])]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if len(arguments) != 1:
        print("usage: python -m ppstream.report.attribution LOGS/RUN", file=sys.stderr)
        return 3
    try:
        found = report(Path(arguments[0]))
    except LogError as error:
        print(error, file=sys.stderr)
        return 3
    print(found or 'this run was not in attribution mode: start one with --set mode="attribution"')
    return 0 if found else 2


if __name__ == "__main__":
    sys.exit(main())
