"""RequestLog: counts the requests of each robot, and logs the counts in the run's folder.

The wires count on the path of a request and write nothing there. A thread writes a line for each
robot that asked since the lines before: each second, and half as often whenever the file has grown
by ``STEP_BYTES``, so that a long run's file stays small. ``RobotRequests`` declares the counts.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec

from ppstream.analysis.records import REQUESTS, RequestError, RobotRequests
from ppstream.core.clock import now_ns
from ppstream.core.durations import LABELS_MAX, OTHER
from ppstream.core.errors import ConfigError, printable
from ppstream.core.quantiles import bin_of

logger = logging.getLogger("ppstream")

EVERY_S: Final = 1.0
STEP_BYTES: Final = 16 << 20
CLOSE_LIMIT_S: Final = 2.0
ROBOT_CHARACTERS: Final = 64  # of a name
STARTS_MAX: Final = 1000  # of gateways in one run's folder
FILE_MODE: Final = 0o640
UNNAMED: Final = "unnamed"  # robot of requests whose client is no robot


class RequestCounts:
    """Counts of one wire since they were last taken; any thread may count.

    Between two takes there are at most ``LABELS_MAX`` names: requests of more robots count as
    those of ``OTHER``.
    """

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self._lock = threading.Lock()
        self._rows: dict[str, RobotRequests] = {}
        self._in_work: dict[str, int] = {}

    def received(self, robot: str, received_ns: int) -> CountedRequest:
        """A request that may turn out to be one for actions; it is not counted yet."""
        return CountedRequest(self, robot, received_ns)

    def begin(self, robot: str) -> str:
        """Count a request; returns the name to end it under."""
        name = printable(robot, ROBOT_CHARACTERS)
        with self._lock:
            if name not in self._rows and name not in self._in_work and self._is_full():
                name = OTHER
            self._row(name).requests += 1
            self._in_work[name] = self._in_work.get(name, 0) + 1
        return name

    def end(self, name: str, took_ns: int, reason: RequestError | None) -> None:
        """Count the end of a request; ``reason`` is None for an answer."""
        with self._lock:
            if left := self._in_work[name] - 1:
                self._in_work[name] = left
            else:
                del self._in_work[name]
            row = self._row(name)
            if reason is not None:
                row.errors[reason] = row.errors.get(reason, 0) + 1
                return
            row.answered += 1
            row.max_ns = max(row.max_ns, took_ns)
            index = bin_of(took_ns)
            row.bins[index] = row.bins.get(index, 0) + 1

    def drain(self) -> list[RobotRequests]:
        """The counts since the last call, of each robot that has any; they begin anew."""
        with self._lock:
            rows, self._rows = self._rows, {}
            for row in rows.values():
                row.unanswered = self._in_work.get(row.robot, 0)
            return list(rows.values())

    def put_back(self, row: RobotRequests) -> None:
        """Count again what was taken and could not be written."""
        row.unanswered = 0
        with self._lock:
            known = row.robot in self._rows or len(self._rows) < LABELS_MAX
            self._row(row.robot if known else OTHER).add(row)

    def _is_full(self) -> bool:
        return len(self._rows.keys() | self._in_work.keys()) >= LABELS_MAX

    def _row(self, name: str) -> RobotRequests:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = RobotRequests(self.wire, name)
        return row


class CountedRequest:
    """One request of a robot; its first end counts, later ones do nothing.

    Attributes:
        received_ns: time of its receipt, from which the time to its answer is measured.
    """

    def __init__(self, counts: RequestCounts, robot: str, received_ns: int) -> None:
        self.received_ns = received_ns
        self._counts = counts
        self._robot = robot
        self._name: str | None = None
        self._has_ended = False

    def begin(self, robot: str | None = None) -> None:
        """Count it as a request for actions, once; of ``robot`` where the name is known now."""
        if self._name is None:
            self._name = self._counts.begin(self._robot if robot is None else robot)

    def answered(self) -> None:
        """Count its answer, now."""
        self._end(None)

    def failed(self, reason: RequestError) -> None:
        """Count it as a request that got no actions."""
        self._end(reason)

    def _end(self, reason: RequestError | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.begin()
            assert self._name is not None, "begun"
            self._counts.end(self._name, now_ns() - self.received_ns, reason)


class RequestLog:
    """``gateway.genN.jsonl`` in a run's folder; N counts the starts of gateways there.

    Args:
        folder: the run's, which holds its ``run.json``.
        counts: of every wire.

    Raises:
        ConfigError: no run is there, or its folder cannot be written to.
    """

    def __init__(
        self, folder: Path, counts: list[RequestCounts], *, step_bytes: int = STEP_BYTES
    ) -> None:
        self._counts = counts
        self._step_bytes = step_bytes
        self._run_id = _run_id(folder)
        self._generation, self._file = _new_file(folder)
        self._size = 0
        self._failure = ""  # the newest one, said once
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)

    def start(self) -> RequestLog:
        """Write from now on, on a thread of its own."""
        self._thread.start()
        return self

    @property
    def interval_s(self) -> float:
        """Time from one line of a robot to the next."""
        return EVERY_S * 2.0 ** (self._size // self._step_bytes)

    def write(self) -> None:
        """Write the counts since the last call; a disk that refuses gets them again later."""
        for counts in self._counts:
            for row in counts.drain():
                if not self._append(row):
                    counts.put_back(row)

    def close(self) -> None:
        """Write the last counts; bounded."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_LIMIT_S)
        if not self._thread.is_alive():
            self.write()
            os.close(self._file)

    def _write_all(self) -> None:
        while not self._closing.wait(self.interval_s):
            self.write()

    def _append(self, row: RobotRequests) -> bool:
        head = {"kind": REQUESTS, "run_id": self._run_id, "generation": self._generation}
        line = head | {"t": now_ns()} | asdict(row)
        if (latency := row.latency) is not None:
            line |= {"p50_ns": latency.p50_ns, "p99_ns": latency.p99_ns}
        data = msgspec.json.encode(line) + b"\n"
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(0, f"{written} of {len(data)} bytes were written")
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)  # a part of a line would be read as one
            self._log_once(error.strerror or type(error).__name__)
            return False
        self._size += len(data)
        return True

    def _log_once(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            logger.error("requests cannot be logged: %s; they are counted on", failure)


def _run_id(folder: Path) -> str:
    file = folder / "run.json"
    try:
        found = json.loads(file.read_bytes())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            [f"--log: {file} cannot be read, want the folder of a run, such as logs/latest"]
        ) from None
    return str(found)


def _new_file(folder: Path) -> tuple[int, int]:
    """The first number that no file has, and the descriptor of its file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        for number in range(STARTS_MAX):
            with suppress(FileExistsError):
                return number, os.open(folder / f"gateway.gen{number}.jsonl", flags, FILE_MODE)
    except OSError as error:
        raise ConfigError([f"--log: cannot write to {folder}: {error.strerror}"]) from error
    raise ConfigError([f"--log: {folder} has the files of {STARTS_MAX} gateways already"])
