"""Profiles a family of transformers, and shipped policies: sizes x contexts x kinds, cell by cell.

    python tools/profile_sweep.py OUT [--sizes small xl] [--contexts 128 512] [--policies vla_1]

Each cell is timed back to back without a profiler, and traced in other steps, whose shares are
taken; warm-up is a range of the trace that is left out. A cell that fails, runs out of memory or
time costs itself alone. Started again, the sweep keeps what is whole: a cell whose settings,
library or device changed, or whose trace is missing, cut or another file, is measured anew.
``OUT`` gets ``cells/*.json``, the traces (``tools/kernel_report.py`` reads them) and ``sweep.svg``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bench.profile_cells import DTYPES, KINDS, POLICY, SIZES
from real_runs import environment_with_sources, print_environment
from rich.console import Console
from rich.table import Table
from rich.text import Text

CONTEXTS: Final = (128, 256, 512, 1024)
FAMILY: Final = tuple(name for name in SIZES if name != "tiny")
BATCH: Final = 4
WARM: Final = 2
STEPS: Final = 5  # timed
TRACED: Final = 1
DONE: Final = "done"
KEPT: Final = (DONE, "out of memory", "refused")  # again would end the same
CELL_LIMIT_S: Final = 120.0
WIDTH: Final = 150
HEADS: Final = (
    *("cell", "ms", "tokens/s", "FLOP a byte", "TFLOP/s", "of the roof"),
    *("matmul", "softmax", "elementwise", "optimizer", "busy", "limited by"),
)
COLD: Final = (38, 70, 120)  # of the heat map, red green blue
HOT: Final = (214, 96, 48)

Result = dict[str, Any]


class Cell(NamedTuple):
    """One place of the sweep; a policy has no context."""

    size: str
    context: int
    kind: str

    @property
    def name(self) -> str:
        return self.size if self.kind == POLICY else f"{self.size}-{self.context}-{self.kind}"


class Worker:
    """The process that measures cells one after the other; a new one after each that failed."""

    def __init__(self, device: str, limit_s: float) -> None:
        self._device, self._limit_s = device, limit_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, **order: Any) -> Result:
        """The answer of the worker; a status that is not ``done`` says how the order failed."""
        process = self._process = self._process or self._begin()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(self._limit_s, process.kill)
        late.start()
        try:
            print(json.dumps({"device": self._device} | order), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        is_late = not late.is_alive()
        late.cancel()
        if line.endswith("\n"):
            found: Result = json.loads(line)
        else:
            code = process.wait()
            why = f"above {self._limit_s:g} s" if is_late else f"its process ended with {code}"
            found = {"status": "failed", "why": why}
        if found["status"] != DONE:
            self._end()
        return found

    def _begin(self) -> subprocess.Popen[str]:
        environment = environment_with_sources()
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "bench.profile_cells"]
        return subprocess.Popen(command, env=environment, **pipes)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


class Sweep:
    """The cells that were asked for, and what is known of each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.out
        (self.folder / "cells").mkdir(parents=True, exist_ok=True)
        self.device: Result = {}  # its peaks and environment
        self.results: dict[Cell, Result] = {}

    def cells(self) -> Iterator[Cell]:
        """Small ones first."""
        for size in self.options.sizes:
            for context in self.options.contexts:
                for kind in self.options.kinds:
                    yield Cell(size, context, kind)
        for name in self.options.policies:
            yield Cell(name, 0, POLICY)

    def settings(self, cell: Cell) -> Result:
        """Everything that a result depends on; another one is measured anew."""
        chosen = {name: getattr(self.options, name) for name in ("dtype", "batch", "steps")}
        sizes = {"shape": SIZES[cell.size]._asdict()} if cell.size in SIZES else {}
        more = {"warm": WARM, "traced": TRACED, "environment": self.device["environment"]}
        return cell._asdict() | chosen | sizes | more

    def run(self, worker: Worker) -> None:
        """Measure what is not there yet."""
        self.device = worker.ask()
        if self.device["status"] != DONE:
            raise SystemExit(f"the device could not be measured: {self.device['why']}")
        cells = list(self.cells())
        for number, cell in enumerate(cells, 1):
            wanted = self.settings(cell)
            kept, why = self._kept(cell, wanted)
            if kept is None:
                trace = self._trace(cell)
                trace.unlink(missing_ok=True)
                print(f"{number} of {len(cells)}  {cell.name}{why and f' ({why})'}", flush=True)
                kept = worker.ask(settings=wanted, trace=str(trace)) | {"settings": wanted}
                if kept["status"] == DONE:
                    kept["trace_sha256"] = sha256(trace.read_bytes()).hexdigest()
                else:
                    print(f"    {kept['status']}: {kept['why']}")
                self._write(cell, kept)
            self.results[cell] = kept

    def _kept(self, cell: Cell, wanted: Result) -> tuple[Result | None, str]:
        """The whole result of an earlier sweep; or none, and why it does not count."""
        file = self._file(cell)
        if not file.exists():
            return None, ""
        try:
            found: Result = json.loads(file.read_text())
            is_same = json.dumps(found["settings"]) == json.dumps(wanted)
        except (ValueError, KeyError, TypeError):
            return None, "its result is damaged"
        if not is_same:
            return None, "its result is stale: made with other settings"
        if found["status"] not in KEPT:
            return None, "it failed before"
        if found["status"] == DONE:
            trace = self._trace(cell)
            if not trace.exists():
                return None, "its trace is gone"
            if sha256(trace.read_bytes()).hexdigest() != found.get("trace_sha256"):
                return None, "its trace is another file, a placeholder or cut"
        return found, ""

    def _write(self, cell: Cell, result: Result) -> None:
        partial = self._file(cell).with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1))
        partial.replace(self._file(cell))

    def _file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"

    def _trace(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.trace.json"


# ---- what was found -----------------------------------------------------------------------------


def table(sweep: Sweep) -> Table:
    """A row a cell. Roof: the most that the counted operations and bytes allow on this device."""
    peaks = sweep.device["peaks"]
    products = ", ".join(f"{dtype} {peaks[dtype] / 1e12:.3g} TFLOP/s" for dtype in DTYPES)
    heading = (
        f"{sweep.device['environment']['device']}: products of {products}; "
        f"a copy {peaks['bytes'] / 1e9:.0f} GB/s"
    )
    found = Table(title=heading, title_justify="left", title_style="", box=None)
    for head in HEADS:
        found.add_column(head, justify="left" if head in (HEADS[0], HEADS[-1]) else "right")
    for cell, one in sweep.results.items():
        if one["status"] != DONE:
            found.add_row(cell.name, f"{one['status']}: {one['why']}"[:60])
            continue
        s = one["ms"] / 1e3
        made = 1 if cell.kind == POLICY else cell.context * sweep.options.batch
        unit = " chunks" if cell.kind == POLICY else ""
        density = one["flops"] / one["bytes"]
        best_s = max(one["flops"] / peaks[one["dtype"]], one["bytes"] / peaks["bytes"])
        ridge = peaks[one["dtype"]] / peaks["bytes"]
        found.add_row(
            cell.name,
            f"{one['ms']:.2f}",
            f"{made / s:,.0f}{unit}",
            f"{density:.1f} {'compute' if density > ridge else 'memory'}",
            f"{one['flops'] / s / 1e12:.3g}",
            f"{best_s / s:.0%}",
            f"{one['categories'].get('matmul', 0):.1%}",
            f"{softmax(one):.1%}",
            f"{one['categories'].get('elementwise', 0):.1%}",
            f"{one['ranges'].get('optimizer', 0):.1%}",
            f"{one['busy_share']:.0%}",
            one["limits"],
        )
    return found


def softmax(result: Result) -> float:
    """Share of the range in which it is written out, else of kernels of that name."""
    share = result["ranges"].get("softmax", result["categories"].get("softmax", 0.0))
    return float(share)


def heat_map(sweep: Sweep, kind: str) -> Table:
    """Share of matrix products by size and context; the colour is that share, too."""
    found = Table(box=None)
    found.add_column(f"matmul, {kind}", min_width=24)
    for context in sweep.options.contexts:
        found.add_column(str(context), justify="right")
    for size in sweep.options.sizes:
        fields = []
        for context in sweep.options.contexts:
            one = sweep.results[Cell(size, context, kind)]
            share = one["categories"].get("matmul", 0.0) if one["status"] == DONE else None
            fields.append(_field(share))
        found.add_row(size, *fields)
    return found


def _field(share: float | None) -> Text:
    if share is None:
        return Text("  -   ")
    mixed = (round(a + (b - a) * share) for a, b in zip(COLD, HOT, strict=True))
    return Text(f" {share:4.0%} ", style=f"white on rgb({','.join(map(str, mixed))})")


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    print_environment(
        f"batch {options.batch}, {options.dtype}, {options.steps} steps timed after {WARM}, "
        f"{TRACED} traced after 1"
    )
    sweep = Sweep(options)
    with Worker(options.device, options.limit_s) as worker:
        sweep.run(worker)
    console = Console(record=True, width=WIDTH, highlight=False)
    console.print(table(sweep))
    for kind in options.kinds if options.sizes else ():
        console.print(heat_map(sweep, kind))
    console.save_svg(str(sweep.folder / "sweep.svg"), title="profile sweep")
    failed = [cell.name for cell, one in sweep.results.items() if one["status"] not in KEPT]
    if failed:
        print(f"failed: {', '.join(failed)}; start it again to measure these alone")
    return 1 if failed else 0


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Choices of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(FAMILY))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--policies", nargs="*", default=[], metavar="CONFIG", help="also these policies, whole"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed in each cell")
    parser.add_argument("--limit-s", type=float, default=CELL_LIMIT_S, help="of one cell")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
