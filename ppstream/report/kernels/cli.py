"""``tools/kernel_report.py TRACE``: where a GPU's time, or a CPU's, goes in a profiler's trace.

Reads torch.profiler's JSON and Nsight Systems' sqlite export; of a folder the newest trace of each
rank, a row for each. Shares are of work; how much of a run that is, and whether it is on its
critical path, says the overlap report.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ppstream.core.errors import LogError, printable
from ppstream.report.kernels import kineto, nsys
from ppstream.report.kernels.findings import WARM_UP, Sum, TraceFindings, bottleneck, findings
from ppstream.report.kernels.trace import Trace

BAD_INPUT: Final = 3
SCHEMA: Final = "ppstream.kernels/1"
HEAD_BYTES: Final = 64
NAME_WIDTH: Final = 52
#: What names of kernels share; behind it they differ.
COMMON: Final = re.compile(r"^void |\(anonymous namespace\)::|\b(?:at::native|c10|std)::")
#: A trace in a run's folder, or one of ``tools/nsys_profile.sh``.
OF_RANK: Final = re.compile(r"rank(\d+)(?:\.gen(\d+)\.(\d+))?\.(?:json(?:\.gz)?|sqlite)$")
US: Final = 1e-3  # per ns
MS: Final = 1e-6  # per ns


def read_trace(path: Path) -> Trace:
    """The trace in ``path``, of either profiler.

    Raises:
        LogError: it is not there, empty, a placeholder, stale, damaged or of another tool.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error
    if not head:
        raise LogError(f"{path}: empty: the profiler ended before it wrote anything")
    if head.startswith(b"version https://git-lfs"):
        raise LogError(f"{path}: a Git LFS placeholder, not the trace itself: git lfs pull")
    if head.startswith(nsys.MAGIC):
        return nsys.read_nsys(path)
    if path.suffix in nsys.REPORTS:
        raise LogError(f"{path}: a report to be exported: nsys export --type sqlite {path}")
    if head[:2] == b"\x1f\x8b" or head.lstrip()[:1] in (b"{", b"["):
        return kineto.read_kineto(path)
    raise LogError(f"{path}: neither torch.profiler's JSON nor an sqlite export of nsys")


def traces_of_ranks(folder: Path) -> dict[int, Path]:
    """The newest trace of each rank in ``folder``, by rank.

    Raises:
        LogError: there is none.
    """
    found = []
    for path in folder.iterdir():
        if match := OF_RANK.search(path.name):
            rank, generation, number = (int(text or 0) for text in match.groups())
            found.append((rank, generation, number, path))
    if not found:
        raise LogError(f"{folder}: no trace of a rank: ppstream.serve writes one at SIGUSR2")
    return {rank: path for rank, _, _, path in sorted(found)}


def rank_lines(of_ranks: Mapping[int, TraceFindings], folder: Path) -> Iterator[str]:
    """A table with a row for each rank, for a terminal; its parts are those of ``run.json``."""
    parts = _parts(folder / "run.json")
    heads = f"{'passes':>12} {'kernels':>8} {'work us':>9} {'busy':>6}"
    yield f"{'rank':{NAME_WIDTH}} {heads}  bottleneck"
    for rank, f in sorted(of_ranks.items()):
        name = printable(f"{rank} {parts.get(rank, '')}".rstrip(), NAME_WIDTH)
        passes = f"{f.passes} of {f.pass_name}" if f.passes else "unknown"
        calls, work = _per_pass(f) if f.passes else ("", "")
        kind, why = bottleneck(f)
        row = f"{name:{NAME_WIDTH}} {passes:>12} {calls:>8} {work:>9} {f.busy_share:6.1%}"
        yield f"{row}  {kind}: {why}"
    yield "kernels (without a GPU: operators) and work are of a pass; a trace alone shows which"


def _parts(manifest: Path) -> dict[int, str]:
    """The policy's parts by rank; empty where the folder does not tell."""
    try:
        ranks = json.loads(manifest.read_text())["topology"]["ranks"]
        return {rank["rank"]: ", ".join(rank.get("parts") or ()) for rank in ranks}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def lines(f: TraceFindings, top: int) -> Iterator[str]:
    """The report, for a terminal."""
    kind, why = bottleneck(f)
    unit = "kernels" if f.is_gpu else "operators"
    yield f"{f.source}: {sum(s.calls for s in f.kernels)} {unit}, {f.span_ns * MS:.2f} ms"
    if f.skipped:
        yield f"left out: {f.skipped} {unit} inside warm-up ranges"
    yield f"bottleneck {kind}: {why}"
    union = f"union {f.busy_ns * MS:.3f} ms, all lanes {f.work_ns * MS:.3f}"
    idle = (
        f"{f.gaps.n} gaps, {f.gaps.total_ns * MS:.3f} ms, longest {f.gaps.longest_ns * US:.0f} us"
    )
    yield f"busy {f.busy_share:.1%} ({union})   idle {idle}"
    if f.is_gpu:
        host = f"host inside launch calls {f.launch_ns * MS:.3f} ms"
        yield f"launch-bound index {f.launch_index:.2f}   {host}"
    yield from _pass_lines(f, unit)
    yield from _table(f"by category of {unit}", f.categories, len(f.categories))
    yield from _table("work by launching range (in each of nested ones)", f.stages, top)
    yield from _table("host time in named ranges", f.ranges, top)
    yield from _table(f"by {unit.removesuffix('s')}", f.kernels, top)
    yield from _copy_lines(f)
    for modes in f.modes:
        speeds = f"{modes.slow_ns * US:.1f} and {modes.fast_ns * US:.1f} us"
        yield f"two speeds: {_cut(modes.name)}  {speeds}, {modes.why}"


def _per_pass(f: TraceFindings) -> tuple[str, str]:
    """Kernels, and us of work, of one pass."""
    in_pass = next((s.total_ns for s in f.stages if s.name == f.pass_name), 0)
    return f"{f.calls_in_passes / f.passes:.1f}", f"{in_pass / f.passes * US:.1f}"


def _pass_lines(f: TraceFindings, unit: str) -> Iterator[str]:
    if f.passes:
        calls, work = _per_pass(f)
        counted = f"{calls} {unit} and {work} us of work an envelope"
        yield f"passes {f.passes} of range {f.pass_name}: {counted}"
    else:
        yield "passes unknown: the trace has no named ranges (--pass NAME picks one)"


def _table(title: str, sums: Sequence[Sum], top: int) -> Iterator[str]:
    if not sums:
        return
    yield ""
    yield (
        f"{title:{NAME_WIDTH}} {'share':>6} {'calls':>7} {'total ms':>9} {'mean us':>9} {'min':>8} "
        f"{'max':>8} {'std':>8}"
    )
    for s in sums[:top]:
        yield (
            f"{_cut(s.name):{NAME_WIDTH}} {s.share:6.1%} {s.calls:7} {s.total_ns * MS:9.3f} "
            f"{s.mean_ns * US:9.2f} {s.min_ns * US:8.2f} {s.max_ns * US:8.2f} {s.std_ns * US:8.2f}"
        )
    if len(sums) > top:
        rest = sum(s.share for s in sums[top:])
        yield f"{f'... {len(sums) - top} more':{NAME_WIDTH}} {rest:6.1%}"


def _copy_lines(f: TraceFindings) -> Iterator[str]:
    if not f.copies:
        return
    yield ""
    yield f"{'copies':{NAME_WIDTH}} {'count':>6} {'bytes':>14} {'ms':>9} {'GB/s':>8}"
    for c in f.copies:
        rate = c.bytes / c.total_ns if c.total_ns else 0.0
        yield f"{c.kind:{NAME_WIDTH}} {c.n:6} {c.bytes:14,} {c.total_ns * MS:9.3f} {rate:8.2f}"


def _cut(name: str) -> str:
    plain = COMMON.sub("", name)
    return plain if len(plain) <= NAME_WIDTH else plain[: NAME_WIDTH - 1] + "…"


def as_dict(f: TraceFindings) -> dict[str, Any]:
    """Everything, for ``--json``; times in ns."""
    kind, why = bottleneck(f)
    plain: dict[str, Any] = asdict(f)
    for key in ("kernels", "categories", "stages", "ranges", "copies", "modes"):
        plain[key] = [record._asdict() for record in getattr(f, key)]
    plain["gaps"] = f.gaps._asdict()
    derived = {"busy_share": f.busy_share, "launch_index": f.launch_index}
    return {"schema": SCHEMA, **plain, **derived, "bottleneck": kind, "why": why}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernel_report", description=_first(__doc__ or ""))
    what = "JSON of torch.profiler, an sqlite of nsys, or a folder with those of a run's ranks"
    parser.add_argument("trace", type=Path, help=what)
    parser.add_argument("--pass", dest="pass_name", help="the range that one envelope is")
    skips = "pattern of warm-up ranges (%(default)s)"
    parser.add_argument("--skip", type=_pattern, default=WARM_UP, help=skips)
    parser.add_argument("--top", type=int, default=15, help="rows a table (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    options = parser.parse_args(argv)

    def found(path: Path) -> TraceFindings:
        return findings(read_trace(path), pass_name=options.pass_name, skip=options.skip)

    told: dict[str, Any]
    try:
        if options.trace.is_dir():
            paths = traces_of_ranks(options.trace)
            of_ranks = {rank: found(path) for rank, path in paths.items()}
            _print(rank_lines(of_ranks, options.trace))
            told = {"schema": SCHEMA, "ranks": {r: as_dict(f) for r, f in of_ranks.items()}}
        else:
            one = found(options.trace)
            _print(lines(one, options.top))
            told = as_dict(one)
    except LogError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
        except OSError as error:
            print(f"cannot write {options.json}: {error.strerror}", file=sys.stderr)
            return BAD_INPUT
    return 0


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern: {error}") from error
    return text


def _print(text: Iterable[str]) -> None:
    for line in text:
        print(line)


def _first(text: str) -> str:
    return text.split("\n")[0].partition(": ")[2]
