"""Count the faults that the tests see: put mutants into a copy one by one and run the tests.

The sample (``mutants.json``) is drawn once, by seed, so that a count before a change and one after
it judge the same faults: as many from each package; there a function by its number of mutants, then
an operator of those it knows, then a place. ``mutations.py`` has the operators. A mutant is named
by function, operator and text; one whose function or line reads otherwise now is *gone*.

A pass first runs every test file of the packages alone, with coverage: each must be green, and its
lines say which functions it reaches, those in processes it starts (and does not kill) included. A
mutant then meets the test files of its own package that reach its function, the quickest first,
until one fails. A timeout, after 20 s and three times what they took before, counts as killed.
Hypothesis draws the same examples each time. The modules in ``LEFT_OUT`` are not in the sample.
Nothing in the checkout is changed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from coverage import CoverageData
from coverage.exceptions import DataError
from mutations import MutatedModule, SourceMutant

HERE: Final = Path(__file__).resolve().parent
#: Package of ``ppstream`` and the folders of ``tests`` that judge it.
JUDGES: Final = {
    "analysis": ("analysis", "report"),
    "ingest": ("ingest",),
    "robot": ("robot",),
    "links": ("links",),
}
#: Modules that no test of their own package can run without a GPU; tests/pipeline runs headers.
LEFT_OUT: Final = {
    "ppstream.ingest.device.rings",
    "ppstream.ingest.device.window",
    "ppstream.ingest.device.window_kernels",
    "ppstream.links.headers",
    "ppstream.links.peer_memory",
}
NOT_COPIED: Final = shutil.ignore_patterns(
    ".*_cache", ".git", ".venv", ".hypothesis", "build", "logs"
)
SPARE_S: Final = 20.0
BASELINE_LIMIT_S: Final = 300.0
KILLED: Final = ("killed", "timeout")
COVERAGE: Final = """[run]
source = {tree}/ppstream
parallel = true
sigterm = true
patch = subprocess, _exit, fork
data_file = {data}
"""

Case = TypeVar("Case")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reach:
    """One test file, run alone."""

    seconds: float
    lines: dict[str, frozenset[int]]  # by the path of a module


@dataclass(frozen=True)
class MutantOutcome:
    """One mutant's end."""

    mutant: SourceMutant
    state: str  # killed, timeout, survived, gone
    by: str = ""  # the test that saw it first
    seconds: float = 0.0
    diff: str = ""

    @property
    def package(self) -> str:
        return package_of(self.mutant.function)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, metavar="SEED", help="draw a new sample and stop")
    parser.add_argument("--count", type=int, default=200, help="how many to draw")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants that hold this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome here")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier --json to compare")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the checkout to judge")
    parser.add_argument("--sample", type=Path, default=HERE / "mutants.json")
    args = parser.parse_args(arguments)
    if args.draw is not None:
        write_sample(args.sample, args.draw, draw(args.root, args.draw, args.count))
        return 0
    os.nice(10)
    started = time.monotonic()
    sample = [mutant for mutant in read_sample(args.sample) if args.only in str(mutant)]
    outcomes = count(args.root, sample, args.workers)
    show(outcomes, (time.monotonic() - started) / 60)
    if args.against:
        show_lost(read_outcomes(args.against), outcomes)
    if args.json:
        args.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1), "utf-8")
    return 0


def draw(root: Path, seed: int, size: int) -> list[SourceMutant]:
    """A sample of ``size``, as many from each package."""
    chance = random.Random(seed)
    sample: list[SourceMutant] = []
    packages = [p for p in JUDGES if (root / "ppstream" / p).is_dir()]
    for place, package in enumerate(packages):
        share = size // len(packages) + (place < size % len(packages))
        every = [mutant for module in modules(root, package) for mutant in parse(root, module)]
        if len(every) < share:
            sys.exit(f"{package} has {len(every)} mutants, fewer than {share}: draw less")
        taken: set[SourceMutant] = set()
        while len(taken) < share:
            function = chance.choice(every).function
            within = [mutant for mutant in every if mutant.function == function]
            operator = chance.choice(sorted({mutant.operator for mutant in within}))
            taken.add(chance.choice([mutant for mutant in within if mutant.operator == operator]))
        sample += sorted(taken)
    return sample


def modules(root: Path, package: str) -> list[str]:
    files = sorted((root / "ppstream" / package).rglob("*.py"))
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return [name for name in names if name not in LEFT_OUT]


def parse(root: Path, module: str) -> MutatedModule:
    return MutatedModule(module, (root / path_of(module)).read_text("utf-8"))


def path_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def package_of(function: str) -> str:
    return function.split(".")[1]


def write_sample(file: Path, seed: int, sample: list[SourceMutant]) -> None:
    rows = ",\n".join(json.dumps(asdict(mutant), ensure_ascii=False) for mutant in sample)
    file.write_text(f'{{"seed": {seed}, "mutants": [\n{rows}\n]}}\n', "utf-8")


def read_sample(file: Path) -> list[SourceMutant]:
    return [SourceMutant(**row) for row in json.loads(file.read_text("utf-8"))["mutants"]]


def read_outcomes(file: Path) -> list[MutantOutcome]:
    rows = json.loads(file.read_text("utf-8"))
    return [MutantOutcome(**row | {"mutant": SourceMutant(**row["mutant"])}) for row in rows]


def count(root: Path, sample: list[SourceMutant], workers: int) -> list[MutantOutcome]:
    """Every mutant's outcome, in the sample's order."""
    named = {mutant.function.partition(":")[0] for mutant in sample}
    found = {name: parse(root, name) for name in sorted(named) if (root / path_of(name)).exists()}
    here = [mutant for mutant in sample if mutant in found.get(module_of(mutant), ())]
    ended = {mutant: MutantOutcome(mutant, "gone") for mutant in sample}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(workers)]
        for tree in trees:
            shutil.copytree(root, tree, ignore=NOT_COPIED)
        folders = {judge for m in here for judge in JUDGES[package_of(m.function)]}
        tests = [file for judge in sorted(folders) for file in test_files(root, judge)]
        reached = dict(zip(tests, over(trees, baseline, tests), strict=True))
        done = Counter[str]()

        def judge_one(tree: Path, mutant: SourceMutant) -> MutantOutcome:
            outcome = judge(tree, mutant, found[module_of(mutant)], reached)
            done[outcome.state] += 1
            if outcome.state == "survived":
                print(f"survived {outcome.mutant}", file=sys.stderr)
            elif not done.total() % 10:
                print(f"{done.total()} of {len(here)}: {dict(done)}", file=sys.stderr)
            return outcome

        ended |= {outcome.mutant: outcome for outcome in over(trees, judge_one, here)}
    return list(ended.values())


def module_of(mutant: SourceMutant) -> str:
    return mutant.function.partition(":")[0]


def test_files(root: Path, judge: str) -> list[str]:
    return [str(f.relative_to(root)) for f in sorted((root / "tests" / judge).rglob("test_*.py"))]


def over(
    trees: list[Path], work: Callable[[Path, Case], Result], cases: Iterable[Case]
) -> list[Result]:
    """``work`` of every case, each in a tree that nobody else has meanwhile."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(case: Case) -> Result:
        tree = free.get()
        try:
            return work(tree, case)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        try:
            return list(pool.map(one, cases))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def baseline(tree: Path, test: str) -> Reach:
    """Run one test file with coverage; it must be green, with coverage or without."""
    with tempfile.TemporaryDirectory(dir=tree) as name:
        settings = Path(name) / "coveragerc"
        settings.write_text(COVERAGE.format(tree=tree, data=Path(name) / "data"), "utf-8")
        covered = ("-m", "coverage", "run", f"--rcfile={settings}")
        for how in (covered, ()):  # a test may mind the coverage, but nothing else
            started = time.monotonic()
            status, text = pytest(tree, *how, "-m", "pytest", test, limit_s=BASELINE_LIMIT_S)
            if status in (0, 5):  # 5: every test of it is for GPUs
                break
        else:
            raise SystemExit(f"{test} is red without any mutant:\n{text[-3000:]}")
        seconds = time.monotonic() - started
        lines: dict[str, set[int]] = {}
        for file in Path(name).glob("data*"):
            data = CoverageData(str(file))
            try:
                data.read()
            except DataError:  # of a process that was killed while it wrote
                continue
            for path in data.measured_files():
                module = str(Path(path).relative_to(tree))
                lines.setdefault(module, set()).update(data.lines(path) or ())
    return Reach(seconds, {module: frozenset(some) for module, some in lines.items()})


def judge(
    tree: Path, mutant: SourceMutant, module: MutatedModule, reached: dict[str, Reach]
) -> MutantOutcome:
    """Put the mutant into ``tree``, run the tests that reach its function, take it out again."""
    path = path_of(module_of(mutant))
    folders = tuple(f"tests/{judge}/" for judge in JUDGES[package_of(mutant.function)])
    body = module.body_lines(mutant)
    tests = [
        test
        for test, reach in sorted(reached.items(), key=lambda item: item[1].seconds)
        if test.startswith(folders) and not reach.lines.get(path, frozenset()).isdisjoint(body)
    ]
    before, after = (tree / path).read_text("utf-8"), module.source(mutant)
    rows = difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, "", "", 1, "")
    diff = "\n".join(rows)
    if not tests:
        return MutantOutcome(mutant, "survived", "no test reaches it", diff=diff)
    started = time.monotonic()
    (tree / path).write_text(after, "utf-8")
    os.utime(tree / path, (1, 1))  # as long as the original and as new: bytecode would be reused
    try:
        limit_s = SPARE_S + 3 * sum(reached[test].seconds for test in tests)
        status, text = pytest(tree, "-B", "-m", "pytest", "-x", *tests, limit_s=limit_s)
    finally:
        (tree / path).write_text(before, "utf-8")
    state = "timeout" if status is None else "killed" if status else "survived"
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    seconds = round(time.monotonic() - started, 1)
    return MutantOutcome(mutant, state, first[1] if first and status else "", seconds, diff)


def pytest(tree: Path, *arguments: str, limit_s: float) -> tuple[int | None, str]:
    """Exit status and output of pytest in ``tree``; no status when it took too long."""
    sources = os.pathsep.join(str(tree / part) for part in ("", "kernels", "stages"))
    options = "-q -p no:cacheprovider --tb=short --timeout=60 --hypothesis-profile=ci -m 'not gpu'"
    environment = os.environ | {"PYTHONPATH": sources, "PYTEST_ADDOPTS": options}
    environment["PPSTREAM_NATIVE"] = "0"  # the compiled core would pass a mutant of its twin by
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # also what a test left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def show(outcomes: list[MutantOutcome], minutes: float) -> None:
    for outcome in outcomes:
        if outcome.state == "survived":
            print(f"\nsurvived {outcome.by and f'({outcome.by}) '}{outcome.mutant}\n{outcome.diff}")
    print(f"\n{'package':10}{'killed':>8}{'timeout':>9}{'survived':>10}{'gone':>6}{'rate':>8}")
    for package in [*JUDGES, "all"]:
        some = [o.state for o in outcomes if package in (o.package, "all")]
        if some:
            states = Counter(some)
            numbers = f"{states['killed']:8}{states['timeout']:9}{states['survived']:10}"
            print(f"{package:10}{numbers}{states['gone']:6}{kill_rate(states):>8}")
    print(f"{minutes:.1f} minutes, load average {os.getloadavg()[1]:.1f} of the last five")


def kill_rate(states: Counter[str]) -> str:
    killed = sum(states[state] for state in KILLED)
    judged = killed + states["survived"]
    return f"{killed / judged:.1%}" if judged else "-"


def show_lost(then: list[MutantOutcome], now: list[MutantOutcome]) -> None:
    """Name what was killed then and survives now, and what cannot be compared."""
    states: dict[Any, str] = {outcome.mutant: outcome.state for outcome in then}
    lost = [o for o in now if o.state == "survived" and states.get(o.mutant) in KILLED]
    for outcome in lost:
        print(f"killed then, survives now: {outcome.mutant}")
    won = sum(o.state in KILLED and states.get(o.mutant) == "survived" for o in now)
    new = sum(o.mutant not in states for o in now)
    print(f"{len(lost)} lost, {won} won, {new} not in the earlier count")


if __name__ == "__main__":
    sys.exit(main())
