"""Two real ranks, started from here and read back, spreads and targets, for benchmarks.

Not a benchmark itself. Ranks are started directly, with the environment that torchrun would set;
whatever leaves a ``with`` block, Ctrl-C and SIGTERM included, leaves no process behind.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = tuple(str(ROOT / room) for room in ("", "kernels", "stages", "tools"))
for _room in SOURCES[:3]:
    if _room not in sys.path:
        sys.path.append(_room)  # behind an installation, if there is one

import msgspec
import numpy as np
import zmq
from claimed_numbers import Claim, write_audited

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.run_report import RunReport
from ppstream.core.errors import ExitCode
from ppstream.core.quantiles import nearest_rank
from ppstream.observe.run_folder import hardware

#: Rank 0's ends behind a whole bring-up: the run can be judged.
MEASURED: Final = (ExitCode.DRAINED, ExitCode.GATE_FAIL, ExitCode.GATE_INCONCLUSIVE)
#: Bring-up is the measurement; nobody is served behind it.
BRING_UP_ONLY: Final = ("service.endpoint=none", "service.duration_s=0.05")
RUN_LIMIT_S: Final = 120.0
END_LIMIT_S: Final = 8.0  # a rank that was asked to leave gets this long
POLL_S: Final = 0.02


class RankPair:
    """Rank 0 and the policy rank of one run under ``folder``; none outlives the ``with`` block.

    Args:
        folder: run logs and both ranks' output go here.
        config: as ``--config``.
        settings: as ``--set``, for all ranks.
        environments: more variables of single ranks.
        world_size: ranks, rank 0 among them.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        settings: Sequence[str],
        *,
        environments: Mapping[int, Mapping[str, str]] | None = None,
        world_size: int = 2,
    ) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "ppstream.serve", "--config", config]
        for setting in (f"log.root={folder}", *settings):
            command += ["--set", setting]
        self._outputs = [folder / f"rank{rank}.txt" for rank in range(world_size)]
        self.processes: list[subprocess.Popen[bytes]] = []
        port = free_port()
        try:
            for rank, path in enumerate(self._outputs):
                own = (environments or {}).get(rank, {})
                environment = rank_environment(rank, port, world_size) | dict(own)
                with path.open("w") as output:
                    self.processes.append(
                        subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                    )
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> RankPair:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def directory(self) -> Path:
        """The run's folder; there once rank 0 has begun."""
        return (self._folder / "latest").resolve()

    def pin(self, cpus: Sequence[int]) -> None:
        """Keep each rank on its own of ``cpus``, at once: its threads inherit that."""
        for process, cpu in zip(self.processes, cpus, strict=False):
            os.sched_setaffinity(process.pid, {cpu})

    def wait(self, limit_s: float = RUN_LIMIT_S) -> int:
        """Rank 0's exit code. Exits with both outputs when the ranks do not end in time."""
        deadline = time.monotonic() + limit_s
        try:
            codes = [p.wait(max(POLL_S, deadline - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"no end within {limit_s:g} s:\n{self.output()}") from None
        return codes[0]

    def stop(self) -> None:
        """Ask for a drain, and wait for the end of both."""
        self.processes[0].terminate()
        self.wait(END_LIMIT_S)

    def output(self) -> str:
        return "\n".join(path.read_text() for path in self._outputs if path.exists())

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def measure_bring_up(
    settings: Sequence[str],
    *,
    config: str = "bench",
    limit_s: float = RUN_LIMIT_S,
    world_size: int = 2,
    cpus: Sequence[int] = (),
) -> tuple[RunReport, dict[str, Any]]:
    """Run all ranks through bring-up; returns the judged run and its ``run.json``.

    With ``cpus`` each rank runs on its own of them alone.

    A verdict that refuses the run is a result like any other. Exits with the ranks' output when
    there is nothing to judge.
    """
    with tempfile.TemporaryDirectory(prefix="ppstream-bench-") as folder:
        wanted = (*BRING_UP_ONLY, *settings)
        with RankPair(Path(folder), config, wanted, world_size=world_size) as ranks:
            ranks.pin(cpus)
            code = ranks.wait(limit_s)
        if code not in MEASURED:
            raise SystemExit(f"rank 0 ended with {code}:\n{ranks.output()}")
        manifest = json.loads((ranks.directory / "run.json").read_text())
        return judge(read_run(ranks.directory)), manifest


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGTERM ends the tool as Ctrl-C does: ``with`` blocks are left, so what it started ends."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- what was measured, where, and against what -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Nearest-rank quantiles of a set of values, in their unit."""

    n: int
    mean: float
    p50: float
    p99: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Returns the spread of ``values``; there must be one at least."""
    ordered = sorted(values)
    p50, p99 = (ordered[nearest_rank(len(ordered), percent)] for percent in (50, 99))
    return Spread(len(ordered), sum(ordered) / len(ordered), p50, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Target:
    """A limit, and what was reached: at most ``limit`` meets it."""

    what: str
    limit: float
    reached: float

    @property
    def met(self) -> bool:
        return self.reached <= self.limit

    def __str__(self) -> str:
        word = "met   " if self.met else "MISSED"
        return f"  {word}  {self.what}: {self.reached:.3f}, target at most {self.limit:g}"


def print_targets(targets: Sequence[Target]) -> None:
    """One line for each target, and how many were met."""
    print("\ntargets")
    for target in targets:
        print(target)
    print(f"{sum(target.met for target in targets)} of {len(targets)} targets met")


def environment() -> dict[str, Any]:
    """Hardware and versions that the numbers belong to, and how busy the machine was."""
    import torch  # for this alone; its metadata lack what it was built for (+cu130)

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pyzmq": zmq.__version__,
        "msgspec": msgspec.__version__,
    }
    return hardware() | versions | {"load_1min": round(os.getloadavg()[0], 2)}


def print_environment(mode: str) -> None:
    """The head of every benchmark's output."""
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(f"mode: {mode}\n")


def write_json(
    path: Path | None,
    mode: str,
    targets: Sequence[Target],
    *,
    claims: Sequence[Claim] = (),
    **results: Any,
) -> None:
    """Audit the claims; then the results as JSON, when a path was given."""
    found = [asdict(target) | {"met": target.met} for target in targets]
    whole = {"environment": environment(), "mode": mode, "targets": found, **results}
    write_audited(path, whole, claims)


def environment_with_sources() -> dict[str, str]:
    """Returns this process's environment, in which Python finds the project's rooms first."""
    path = os.pathsep.join((*SOURCES, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return os.environ | {"PYTHONPATH": path}


def rank_environment(rank: int, port: int, world_size: int = 2) -> dict[str, str]:
    return environment_with_sources() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A port below those that the kernel gives to connections: none takes it before it is bound."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
