"""One run under a fault: real ranks, a robot process, the cable between them, and what is seen.

``with started(...) as scene:`` nothing that it started outlives the block; ``orphans`` says what
would have.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from drill.cable import Cable
from drill.live_logs import imbalance, parsed, whole_lines
from drill.processes import MARK, marked
from real_runs import POLL_S, ROOT, RankPair, free_port

from ppstream.config.load import read

CONFIG: Final = str(Path(__file__).with_name("drill.toml"))
READY_LIMIT_S: Final = 180.0
END_LIMIT_S: Final = 30.0
MOVING_TICKS: Final = 10
STARTS_MAX: Final = 3
T = TypeVar("T")


class GateRefused(Exception):
    """The run did not become ready: on a busy machine its gate may find itself unable to judge."""


class Failed(Exception):
    """An expectation that was not met; the message words what was seen instead."""


class Tick(NamedTuple):
    """One line of the robot."""

    at_ns: int
    moved: bool
    age_ms: float = 0.0  # that its action claims
    true_ms: float = 0.0  # since the newest sample was sent that it was computed from


class Elsewhere:
    """Ranks that somebody else started, with logs under ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def directory(self) -> Path:
        return (self._folder / "latest").resolve()

    def output(self) -> str:
        return "\n".join(path.read_text() for path in self._folder.glob("torchrun*.txt"))


class Scene:
    """Ranks and, with ``robot``, a robot behind a cable, which moves once ``start`` returns.

    Args:
        folder: for logs, orders and outputs of this scene.
        settings: as ``--set``.
        robot: start one, and wait until it executes actions.
    """

    def __init__(self, folder: Path, settings: Sequence[str] = (), *, robot: bool = True) -> None:
        self.folder = folder
        self._settings = settings
        self._has_robot = robot
        self._mark = secrets.token_hex(8)
        self._stack = ExitStack()
        self._seen: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._ticks: dict[Path, tuple[int, list[Tick]]] = {}
        self._stories: list[Path] = []  # of the robots, one after the other
        self.orders = folder / "orders"
        self.robot: subprocess.Popen[str] | None = None
        self._answering: Sequence[int] = (1,)  # ranks that answer rank 0
        self.cable: Cable
        self._endpoint = ""  # of robots without a cable
        self.ranks: RankPair | Elsewhere

    def __enter__(self) -> Scene:
        return self

    def start(self) -> Scene:
        """Start everything; what was started ends here when something fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._stack:
            self.port = free_port()
            settings = (
                f"service.endpoint=tcp://127.0.0.1:{self.port}",
                f"policy.options.orders={self.orders}",
                *self._settings,
            )
            os.environ[MARK] = self._mark
            self._stack.callback(os.environ.pop, MARK)
            config = read(CONFIG, settings)
            last = config.placement.leaders
            self._answering = range(1, last + 1) if config.placement.replicas > 1 else (last,)
            pair = RankPair(self.folder, CONFIG, settings, world_size=config.placement.ranks)
            self.ranks = self._stack.enter_context(pair)
            self.cable = Cable("127.0.0.1", self.port)
            self._stack.callback(self.cable.close)
            if self._has_robot:
                self.robot = self.start_robot()
                self.wait_moving(READY_LIMIT_S)
            else:
                self.wait("ready", READY_LIMIT_S, self._is_ready)
            self._stack = self._stack.pop_all()
        return self

    def stop(self) -> None:
        """Have the ranks drain, as a launcher does, and wait for their end."""
        for rank in range(len(self.ranks.processes)):
            self.signal(rank, signal.SIGTERM)
        self.wait("the ranks drained", END_LIMIT_S, lambda: None not in self.codes() or None)

    def attach(self, port: int) -> None:
        """A cable to ranks that somebody else starts, and no robot yet."""
        self.port = port
        self.ranks = Elsewhere(self.folder)
        self.cable = Cable("127.0.0.1", port)
        self._stack.callback(self.cable.close)

    def attach_to(self, endpoint: str) -> None:
        """The same without a cable."""
        self.ranks = Elsewhere(self.folder)
        self._endpoint = endpoint

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- inject --------------------------------------------------------------------------------

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.ranks.processes[rank].send_signal(number)

    def order_policy(self, kind: str, envelopes: int, part: str = "") -> None:
        """The next so many envelopes fail in this way (``policy.FAULTS``), in ``part``."""
        written = self.orders.with_suffix(".part")
        written.write_text(f"{kind} {envelopes}")
        written.replace(f"{self.orders}{part}")

    def order_robot(self, name: str, value: float) -> None:
        assert self.robot is not None
        assert self.robot.stdin is not None
        self.robot.stdin.write(f"{name} {value}\n")
        self.robot.stdin.flush()

    def start_robot(self) -> subprocess.Popen[str]:
        """Another robot of the same name, on the same cable."""
        rate_hz = str(read(CONFIG, self._settings).reference.rate_hz)
        program = str(ROOT / "tools" / "drill/robot.py")
        command = [sys.executable, program, self._endpoint or self.cable.endpoint, rate_hz]
        path = self.folder / f"robot{secrets.token_hex(3)}.txt"
        self._stories.append(path)
        with path.open("w") as output, (self.folder / "robot.err").open("a") as errors:
            robot = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True
            )
        self._stack.callback(_end, robot)
        return robot

    def start_beside(self, name: str, command: Sequence[str]) -> None:
        """A Python program that ends with the scene; what it prints stands in ``name``.txt."""
        with (self.folder / f"{name}.txt").open("w") as output:
            program = subprocess.Popen([sys.executable, *command], stdout=output)
        self._stack.callback(_end, program)

    def limit_files(self, rank: int, more_bytes: int | None) -> None:
        """No file of the rank may grow by more: its disk is full. None: there is room again."""
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        size = 0 if more_bytes is None else self.log_path(rank).stat().st_size + more_bytes
        limits = unlimited if more_bytes is None else (size, resource.RLIM_INFINITY)
        resource.prlimit(self.ranks.processes[rank].pid, resource.RLIMIT_FSIZE, limits)

    # ---- see -----------------------------------------------------------------------------------

    def wait(self, what: str, limit_s: float, look: Callable[[], T | None]) -> T:
        """Returns what ``look`` finds, as soon as it does; raises Failed after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not within {limit_s:g} s")
            time.sleep(POLL_S)
        return found

    def wait_moving(self, limit_s: float, since_ns: int = 0) -> None:
        """Until the robot executes actions, ``MOVING_TICKS`` ticks in a row since a moment."""

        def look() -> bool | None:
            self._check_alive()
            newest = self.ticks(since_ns)[-MOVING_TICKS:]
            return (len(newest) == MOVING_TICKS and all(tick.moved for tick in newest)) or None

        self.wait("the robot moves", limit_s, look)

    def has_held_since(self, since_ns: int) -> bool | None:
        """True when the robot held at some tick; None: not yet."""
        return any(not tick.moved for tick in self.ticks(since_ns)) or None

    def ticks(self, since_ns: int = 0) -> list[Tick]:
        """Ticks since a moment, oldest first, a replaced robot's, too; 0: all of the newest one."""
        found: list[Tick] = []
        for story in reversed(self._stories):
            ticks = self._read_ticks(story)
            found = ticks[bisect_left(ticks, since_ns, key=lambda tick: tick.at_ns) :] + found
            if not since_ns or (ticks and ticks[0].at_ns < since_ns):
                break
        return found

    def _read_ticks(self, story: Path) -> list[Tick]:
        offset, ticks = self._ticks.get(story, (0, []))
        whole, offset = whole_lines(story, offset)
        for line in whole:
            at, kind, *ages = line.split()
            ticks.append(Tick(int(at), kind == b"moved", *map(float, ages)))
        self._ticks[story] = offset, ticks
        return ticks

    def log_path(self, rank: int, generation: int = 0) -> Path:
        return self.ranks.directory / f"rank{rank}.gen{generation}.jsonl"

    def lines(self, rank: int = 0) -> Iterator[dict[str, Any]]:
        """Complete lines of a rank's log so far; what was read before is kept."""
        offset, lines = self._seen.get(rank, (0, []))
        whole, offset = whole_lines(self.log_path(rank), offset)
        lines += map(parsed, whole)
        self._seen[rank] = offset, lines
        return iter(lines)

    def event(self, since_ns: int, name: str, **fields: Any) -> dict[str, Any] | None:
        """The first event of rank 0's log of that name (and fields) since a moment."""
        for line in self.lines():
            is_it = line.get("name") == name and line["t"] >= since_ns
            if is_it and fields.items() <= line.items():
                return line
        return None

    def drops(self, reason: str) -> int:
        """Envelopes and samples that rank 0's newest ledger counts under a reason."""
        ledger = next((e for e in reversed(list(self.lines())) if e["kind"] == "ledger"), None)
        entries = () if ledger is None else (ledger["envelopes"], *ledger["streams"].values())
        return sum(entry["dropped"].get(reason, 0) for entry in entries)

    def imbalance(self) -> str:
        """Words what the ranks' logs do not account for; empty: they balance."""
        answering = self._answering
        # first: what they answered rank 0 has logged by then, or nearly
        back = [line for rank in answering for line in self.lines(rank)]
        if len(answering) > 1:  # replicas in turn
            back = [line for line in back if line["kind"] == "stage1"]
            back.sort(key=lambda line: (line["epoch"], line["seq"]))
        return imbalance(list(self.lines()), back)

    def orphans(self) -> list[int]:
        """Processes that this scene started, directly or not, and that live though they ended."""
        known = {os.getpid()} | ({self.robot.pid} if self.robot is not None else set())
        return [pid for pid in marked(self._mark) if pid not in known]

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.ranks.processes]

    @property
    def is_running(self) -> bool:
        """True while rank 0 runs, and no other rank failed: a spare replica's guard ends with 0.

        Of ranks that somebody else started nothing is known.
        """
        codes = self.codes()
        return not codes or (codes[0] is None and set(codes[1:]) <= {None, 0})

    def _is_ready(self) -> bool | None:
        self._check_alive()
        if not self.ranks.directory.joinpath("run.json").exists() or not self.log_path(0).exists():
            return None
        return None if self.event(0, "phase", phase="ready") is None else True

    def _check_alive(self) -> None:
        if any(code in (30, 31) for code in self.codes()):
            raise GateRefused(self.ranks.output()[-2000:])
        if not self.is_running:
            raise Failed(f"ranks ended with {self.codes()}:\n{self.ranks.output()[-2000:]}")


def started(folder: Path, settings: Sequence[str] = (), *, robot: bool = True) -> Scene:
    """A scene to be entered that is ready: a run that was refused is started again."""
    for attempt in range(STARTS_MAX):
        scene = Scene(folder / str(attempt), settings, robot=robot)
        try:
            return scene.start()
        except GateRefused as error:
            refused = str(error)
    raise Failed(f"refused {STARTS_MAX} times:\n{refused}")


def _end(program: subprocess.Popen[Any]) -> None:
    program.kill()
    program.wait()
    if program.stdin is not None:
        program.stdin.close()
