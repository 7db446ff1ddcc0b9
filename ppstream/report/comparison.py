"""Two sides of a comparison, read from disk, and what they say. The rules stand in ``compare``."""

from __future__ import annotations

from pathlib import Path

from ppstream.analysis.compare import SEVERAL, Comparison, Difference, Side, compare
from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import find_runs, read_run


def compare_folders(a: Path, b: Path, *, phase: str | None = None) -> Comparison:
    """Compare a run, or all runs of a folder, with another.

    Raises:
        LogError: no readable run there.
        CompareError: they cannot be compared; names every reason.
    """
    names = ("A", "B") if a.name == b.name else (a.name, b.name)
    return compare(*(_side(path, name, phase) for path, name in zip((a, b), names, strict=True)))


def comparison_text(found: Comparison) -> str:
    """For a terminal: the sentence first, then the numbers and what was set differently."""
    width = max(len("quantity"), *(len(d.name) for d in found.differences))
    lines = [found.verdict, ""]
    lines.append(f"{'quantity':<{width}}  {'A':>9}  {'B':>9}  change, 95 % interval")
    lines += [_line(d, width) for d in found.differences]
    counts = [
        (len(side.runs), sum(r.window.n for _, r in side.runs)) for side in (found.a, found.b)
    ]
    texts = [f"{runs} run{'s' * (runs > 1)}, {n} envelopes" for runs, n in counts]
    lines += ["", f"A {found.a.name}: {texts[0]}", f"B {found.b.name}: {texts[1]}"]
    lines += [f"set differently: {knob}" for knob in found.knobs]
    cold = [
        r.run_id for side in (found.a, found.b) for _, r in side.runs if "NOT_WARM" in r.reasons
    ]
    if cold:
        lines.append(f"the period never became steady (NOT_WARM) in {', '.join(cold)}")
    if min(runs for runs, _ in counts) < SEVERAL:
        lines += [
            "the interval covers what varies within these runs, not from one start to the next:",
            f"for that, compare folders of {SEVERAL} runs or more a side, taken in turn",
        ]
    return "\n".join(lines)


def comparison_dict(found: Comparison) -> dict[str, object]:
    """The JSON form; changes are relative, ``b / a - 1``."""
    return {
        "verdict": found.verdict,
        "a": [report.run_id for _, report in found.a.runs],
        "b": [report.run_id for _, report in found.b.runs],
        "differences": [
            {
                "name": d.name,
                "a_ms": d.a,
                "b_ms": d.b,
                "change": d.change,
                "low": d.low,
                "high": d.high,
            }
            for d in found.differences
        ],
        "set_differently": list(found.knobs),
    }


def _side(path: Path, name: str, phase: str | None) -> Side:
    logs = [read_run(folder) for folder in find_runs(path)]
    return Side(name, tuple((run, judge(run, phase=phase)) for run in logs))


def _line(d: Difference, width: int) -> str:
    shown = "" if d.is_shown else "   not shown"
    return (
        f"{d.name:<{width}}  {d.a:6.2f} ms  {d.b:6.2f} ms  {d.change:+.1%} "
        f"[{d.low:+.1%}, {d.high:+.1%}]{shown}"
    )
