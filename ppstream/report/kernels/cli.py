"""``tools/kernel_report.py TRACE``: where a GPU's time, or a CPU's, goes in a profiler's trace.

Reads torch.profiler's JSON and Nsight Systems' sqlite export. Shares are of work; how much of a run
that is, and whether it is on its critical path, says the overlap report.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ppstream.core.errors import LogError
from ppstream.report.kernels import kineto, nsys
from ppstream.report.kernels.findings import WARM_UP, Sum, TraceFindings, bottleneck, findings
from ppstream.report.kernels.trace import Trace

BAD_INPUT: Final = 3
HEAD_BYTES: Final = 64
NAME_WIDTH: Final = 52
#: What names of kernels share; behind it they differ.
COMMON: Final = re.compile(r"^void |\(anonymous namespace\)::|\b(?:at::native|c10|std)::")
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


def _pass_lines(f: TraceFindings, unit: str) -> Iterator[str]:
    if f.passes:
        in_pass = next((s.total_ns for s in f.stages if s.name == f.pass_name), 0)
        calls = f"{f.calls_in_passes / f.passes:.1f} {unit}"
        work = f"{in_pass / f.passes * US:.1f} us of work"
        yield f"passes {f.passes} of range {f.pass_name}: {calls} and {work} an envelope"
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
    return {"schema": "ppstream.kernels/1", **plain, **derived, "bottleneck": kind, "why": why}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernel_report", description=_first(__doc__ or ""))
    parser.add_argument("trace", type=Path, help="JSON of torch.profiler, or an sqlite of nsys")
    parser.add_argument("--pass", dest="pass_name", help="the range that one envelope is")
    parser.add_argument("--skip", default=WARM_UP, help="pattern of warm-up ranges (%(default)s)")
    parser.add_argument("--top", type=int, default=15, help="rows a table (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    options = parser.parse_args(argv)
    try:
        found = findings(read_trace(options.trace), pass_name=options.pass_name, skip=options.skip)
    except LogError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    _print(lines(found, options.top))
    if options.json is not None:
        options.json.write_text(json.dumps(as_dict(found), indent=1) + "\n")
    return 0


def _print(text: Iterable[str]) -> None:
    for line in text:
        print(line)


def _first(text: str) -> str:
    return text.split("\n")[0].partition(": ")[2]
