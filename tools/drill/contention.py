"""Runs that are slow in a way that stamps alone do not show: the gate or the report has to.

The policy and the decoder of these runs stand here, too: they work on a CPU, or sleep holding one
lock, so that two stages that seem to run beside each other run in turn.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from drill.judging import FaultOutcome, judge_ledger
from drill.launches import LaunchDrill
from drill.live_logs import imbalances
from drill.scene import CONFIG, READY_LIMIT_S, Failed, started
from drill.torchrun import expect_end, launched
from real_runs import POLL_S, ROOT, RankPair

from ppstream.core import simulated_delay
from ppstream.core.clock import NS_PER_MS, now_ns, thread_cpu_ns
from ppstream.core.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device

GATE: Final = (
    "bringup.overlap_min=0.3",
    "bringup.accept=[]",
    "bringup.standalone=15",
    "bringup.warmup_max=60",
)
NOBODY: Final = ("service.endpoint=none", "service.duration_s=0.05")
GATE_LIMIT_S: Final = 90.0
CALIBRATED_NS: Final = 20 * NS_PER_MS  # of CPU time
PAUSE_NS: Final = 4 * NS_PER_MS
SLOWER_MS: Final = 9
OTHERS: Final = 2
BESIDE_OTHERS: Final = (30, 31)  # a busy machine may leave too little to judge
BUSY_LIMIT_S: Final = 240.0
PATIENT: Final = "actions.lease_ms=3000"  # beside others nothing is late
BUSY: Final = "print(flush=True)\nwhile True: pass"
SERVED_S: Final = 4.0
CONTENDED: Final = "bring-up verdict FAIL: CONTENDED"
REPORT: Final = ROOT / "tools" / "overlap_report.py"


# ---- stages ----------------------------------------------------------------------------------


def _count(steps: int) -> None:
    """Works in Python, and holds the interpreter."""
    for _ in range(steps):
        pass


def _steps_per_ms() -> float:
    """Of ``_count`` by this thread's CPU time: what else runs here does not matter."""
    steps, began = 0, thread_cpu_ns()
    while thread_cpu_ns() - began < CALIBRATED_NS:
        _count(1000)
        steps += 1000
    return steps * NS_PER_MS / (thread_cpu_ns() - began)


def _worker(kind: str, lock: str) -> Callable[[float], None]:
    """Spends so many ms: of CPU time, or asleep (``lock``).

    ``lock``, ``locked-work`` and ``slower-alone`` hold the file's lock meanwhile. ``pinned`` keeps
    its thread to one CPU. ``slower-alone`` works longer after a pause, as there is none in the run.
    """
    per_ms = _steps_per_ms()

    def work(ms: float) -> None:
        _count(round(ms * per_ms))

    if kind == "work":
        return work
    if kind == "pinned":
        first = min(os.sched_getaffinity(0))

        def pinned(ms: float) -> None:
            os.sched_setaffinity(0, {first})
            work(ms)

        return pinned
    file = Path(lock).open("w")  # noqa: SIM115 - as long as the process
    ended_ns = now_ns()

    def locked(ms: float) -> None:
        nonlocal ended_ns
        if kind == "slower-alone" and now_ns() - ended_ns > PAUSE_NS:
            ms += SLOWER_MS
        fcntl.flock(file, fcntl.LOCK_EX)
        if kind == "lock":
            time.sleep(ms / 1000)
        else:
            work(ms)
        fcntl.flock(file, fcntl.LOCK_UN)
        ended_ns = now_ns()

    return locked


class WorkingPolicy:
    """Actions are zeros, after work."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.inputs = (TensorSpec("state.values", (options["steps"], options["dim"])),)
        self.outputs = (TensorSpec("actions", (15, 3)),)
        self._spend = _worker(options["kind"], options["lock"])
        self._b_ms = options["b_ms"]

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._spend(self._b_ms)
        out["actions"].zero_()


def build(options: Mapping[str, Any], device: Device) -> WorkingPolicy:
    return WorkingPolicy(options)


def build_decoder(options: Mapping[str, Any], actions: object) -> WorkingDecoder:
    return WorkingDecoder(options)


class WorkingDecoder:
    """Copies actions; ``simulate.a_ms`` and ``c_ms`` of this process are spent by its worker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        spend = _worker(options["kind"], options["lock"])
        simulated_delay.Delay.spend = lambda delay: spend(delay.draw_ns() / NS_PER_MS)  # type: ignore[method-assign]

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def __call__(self, row: int, result: Mapping[str, Any], out: Any) -> None:
        out[:] = result["actions"]


def _stages(kind: str, a_ms: float, b_ms: float, c_ms: float, folder: Path) -> tuple[str, ...]:
    lock = folder / "lock"
    return (
        "policy.target=drill.contention:build",
        f"policy.options={{kind='{kind}', b_ms={b_ms}, lock='{lock}', steps=8, dim=5}}",
        "decode.target=drill.contention:build_decoder",
        f"decode.options={{kind='{kind}', lock='{lock}'}}",
        f"simulate.a_ms={a_ms}",
        f"simulate.c_ms={c_ms}",
    )


# ---- runs ------------------------------------------------------------------------------------


def one_cpu(folder: Path, outcome: FaultOutcome) -> None:
    """Both ranks may use one CPU, as in a small container."""
    settings = (*_stages("work", 0.5, 8, 6, folder), *GATE, *NOBODY, f"log.root={folder}")
    output = folder / "torchrun.txt"
    with launched(output, ("--nproc-per-node=2",), settings, ("taskset", "-c", "0")) as (run, _):
        expect_end(run)
    _expect_contended(folder, output.read_text(), outcome)
    if "on 1 usable CPU" not in output.read_text():
        raise Failed("nobody said that there is one CPU only")


def shared_lock(folder: Path, outcome: FaultOutcome) -> None:
    """Policy and decoder hold one lock while they work."""
    settings = (*_stages("lock", 0.0, 8, 7, folder), *GATE, *NOBODY)
    with RankPair(folder, CONFIG, settings) as ranks:
        ranks.wait(GATE_LIMIT_S)
        _expect_contended(folder, ranks.output(), outcome)


def one_lock_beside_others(folder: Path, outcome: FaultOutcome) -> None:
    """The same, at work, while other programs take what CPUs there are."""
    stages = _stages("locked-work", 0.0, 12, 9, folder)
    _refused(stages, folder, outcome, BESIDE_OTHERS, beside=_others)


def one_cpu_of_two(folder: Path, outcome: FaultOutcome) -> None:
    """Both threads keep to one CPU, the machine has more, and other programs run on them."""
    if len(os.sched_getaffinity(0)) < OTHERS:
        raise Failed("needs two CPUs")
    stages = _stages("pinned", 0.0, 12, 9, folder)
    _refused(stages, folder, outcome, BESIDE_OTHERS, beside=_others)


def slower_alone(folder: Path, outcome: FaultOutcome) -> None:
    """One lock, and the stages work longer where they are timed alone."""
    _refused(_stages("slower-alone", 0.0, 12, 9, folder), folder, outcome)


@contextmanager
def _others() -> Iterator[None]:
    """Other programs, which work as long as they may."""
    with ExitStack() as stack:
        for _ in range(OTHERS):
            other = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
            )
            stack.callback(other.kill)
            assert other.stdout is not None
            other.stdout.readline()
        yield


def _refused(
    stages: Sequence[str],
    folder: Path,
    outcome: FaultOutcome,
    codes: Sequence[int] = (30,),
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """The run must be refused; ``beside`` runs from its folder's beginning to its end."""
    with RankPair(folder, CONFIG, (*stages, *GATE, *NOBODY, PATIENT)) as ranks:
        _wait_for_folder(folder)  # imports take longest, and show nothing
        with beside():
            ranks.wait(BUSY_LIMIT_S)
        _expect_contended(folder, ranks.output(), outcome, codes)


def _wait_for_folder(folder: Path) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while not (folder / "latest").exists():
        if time.monotonic() > deadline:
            raise Failed(f"no run began within {READY_LIMIT_S:g} s")
        time.sleep(POLL_S)


def one_interpreter(folder: Path, outcome: FaultOutcome) -> None:
    """A and C have a thread each, and both hold the interpreter while they work."""
    settings = (*_stages("work", 6, 3, 6, folder), *GATE, *NOBODY, "pipeline.threads=split")
    with RankPair(folder, CONFIG, settings) as ranks:
        ranks.wait(GATE_LIMIT_S)
        _expect_contended(folder, ranks.output(), outcome)


def worse_service(folder: Path, outcome: FaultOutcome) -> None:
    """The policy is quick until it serves a robot."""
    with started(folder, robot=False) as scene:
        scene.order_policy("slow", 1000)
        scene.robot = scene.start_robot()
        time.sleep(SERVED_S)
        scene.stop()
        code, text = _report(scene.ranks.directory)
    outcome.seen = _line(text, "bring-up PASS, service: ")
    if code == 0 or "B took" not in outcome.seen:
        raise Failed(f"the report ended with {code}:\n{text}")


def forged_folder(folder: Path, outcome: FaultOutcome) -> None:
    """A run that was refused, and its log then says what an ideal pipeline would have said."""
    settings = ("pipeline.d_in=1", "simulate.a_ms=10", "simulate.c_ms=0", *GATE, *NOBODY)
    with RankPair(folder, CONFIG, (*settings, "policy.options.b_ms=12")) as ranks:
        if (code := ranks.wait(GATE_LIMIT_S)) != 30:
            raise Failed(f"code {code}:\n{ranks.output()[-1500:]}")
        forge(ranks.directory)
        code, text = _report(ranks.directory)
    outcome.seen = _line(text, "CONTRADICTED: ")
    if code == 0 or "verdict was FAIL LOW_OVERLAP" not in " ".join(text.split()):
        raise Failed(f"the report ended with {code}:\n{text}")


def forge(run: Path) -> None:
    """Rewrite rank 0's lines so that B follows B without a pause and A runs beside it."""
    path = run / "rank0.gen0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    envelopes = [line for line in lines if line["kind"] == "envelope"]
    period_ns = sorted(line["B_ns"] for line in envelopes)[len(envelopes) // 2]
    for k, line in enumerate(envelopes):
        moved_ns = envelopes[0]["tSend"] + k * period_ns - line["tSend"]
        for stamp in ("tRx", "tA0", "tA1", "tSend", "tRecv", "tDecode", "tEmit"):
            if line.get(stamp) is not None:  # one that was too late was not emitted
                line[stamp] += moved_ns
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _expect_contended(
    folder: Path, output: str, outcome: FaultOutcome, codes: Sequence[int] = (30,)
) -> None:
    directory = (folder / "latest").resolve()
    ends: dict[str, Any] = {}
    with suppress(OSError):
        ends = json.loads((directory / "exit.json").read_text())
    outcome.codes = tuple(end["code"] for _, end in sorted(ends.items()))
    outcome.seen = _line(output, "CONTENDED: overlap")
    refused = len(outcome.codes) == 2 and set(outcome.codes) <= set(codes)
    if not refused or (CONTENDED if codes == (30,) else "CONTENDED: overlap") not in output:
        raise Failed(f"codes {outcome.codes}:\n{output[-2500:]}")
    judge_ledger(outcome, imbalances(directory))


def _line(text: str, begin: str) -> str:
    found = [line.strip("· ") for line in text.splitlines() if begin in line]
    return found[0] if found else "nothing said"


def _report(directory: Path) -> tuple[int, str]:
    command: Sequence[str] = (sys.executable, str(REPORT), str(directory))
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_LIMIT_S)
    return done.returncode, done.stdout + done.stderr


CONTENTION: Final = (
    LaunchDrill("one-cpu", "", "both ranks under taskset -c 0", "30 CONTENDED", one_cpu),
    LaunchDrill("shared-lock", "", "policy and decoder take one lock", "30 CONTENDED", shared_lock),
    LaunchDrill(
        "lock-beside-others",
        "",
        "they take one lock, two other programs run",
        "30 CONTENDED",
        one_lock_beside_others,
    ),
    LaunchDrill(
        "one-cpu-of-two",
        "",
        "both threads pin themselves to one CPU",
        "30 CONTENDED",
        one_cpu_of_two,
    ),
    LaunchDrill(
        "slower-alone", "", "one lock, slower where timed alone", "30 CONTENDED", slower_alone
    ),
    LaunchDrill("one-interpreter", "", "A and C work in Python", "30 CONTENDED", one_interpreter),
    LaunchDrill("worse-service", "", "B slower once it serves", "no PASS", worse_service),
    LaunchDrill("forged-folder", "", "stamps rewritten as ideal", "no PASS", forged_folder),
)
