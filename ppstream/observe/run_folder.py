"""Run folders: where logs, ``run.json`` and ``exit.json`` live. The only reader of wall time.

``logs/<run>/`` belongs to one run over all its restart generations; ``logs/latest`` points at it.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from ppstream import native
from ppstream.analysis.log_reader import log_files
from ppstream.config.rules import nearest_there
from ppstream.control.peer_process import start_time
from ppstream.core.errors import FINAL_CODES, OTHER_LEFT, ConfigError, ExitCode, PeerLeftError

SCHEMA: Final = "ppstream.log/1"
LAUNCHER_RUN: Final = "TORCHELASTIC_RUN_ID"  # of a rank that torchrun's agent has started
ROBOT_STORY: Final = "robot.txt"  # what the embedded robot says at its end
DIRECTORY_MODE: Final = 0o750
RUN_NAME: Final = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
TOLD_DIGITS: Final = 16
LOCK_TRIES: Final = 50
LOCK_PAUSE_S: Final = 0.02  # a process that holds it for longer is stopped


def utc_now() -> str:
    """Wall time for people, never for arithmetic."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class Run:
    """One run's folder.

    Rank 0 creates it; every rank of the host adds its own end to ``exit.json``. A rank that belongs
    to it holds a lock on the folder until its process ends: no other run deletes it meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_id = directory.name
        self._held = -1

    @classmethod
    def create(cls, root: Path, keep: int) -> Run:
        """A new folder under ``root``; ``latest`` points at it, all but ``keep`` runs are deleted.

        Raises:
            ConfigError: the folder cannot be created.
        """
        stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S")
        run = cls(root / f"{stamp}-{secrets.token_hex(3)}")
        try:
            run.directory.mkdir(mode=DIRECTORY_MODE, parents=True)
            run.hold()
            _prune(root, keep)
            _point_latest(root, run.directory)
        except OSError as error:
            raise _cannot_write(root, error) from error
        return run

    @classmethod
    def of_launcher(cls, root: Path, launcher_pid: int | None = None) -> Run | None:
        """The newest run that a launcher began, if any; our parent process unless given.

        Its number alone is worth nothing: another one may have had it, in another container or
        after a restart of the host.
        """
        wanted = launcher_identity(launcher_pid or os.getppid())
        launch = os.environ.get(LAUNCHER_RUN) if launcher_pid is None else None
        for directory in reversed(_runs(root)):
            manifest = _read(directory / "run.json")
            is_its = None not in wanted.values() and wanted.items() <= manifest.items()
            if is_its and launch in (None, manifest.get("launcher_run_id")):
                run = cls(directory)
                run.hold()
                return run
        return None

    def hold(self) -> None:
        """Keep this folder from being deleted until this process ends, where there are locks."""
        with suppress(OSError):
            self._held = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._held, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let the folder be deleted, before this process ends. Twice is fine."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def next_generation(self) -> int:
        """Returns a number larger than that of each start which left a log or an end here."""
        begun = [name.generation for name in log_files(self.directory).values()]
        begun += [int(end.get("generation", 0)) for end in self.ends().values()]
        return max(begun, default=0) + 1

    def log_path(self, rank: int, generation: int) -> Path:
        return self.directory / f"rank{rank}.gen{generation}.jsonl"

    def describe(self, **fields: Any) -> None:
        """Merge ``fields`` into run.json; readers see the old file or the new one, never half.

        Raises:
            ConfigError: the folder is gone, full or read-only.
        """
        path = self.directory / "run.json"
        try:
            _write(path, _read(path) | fields)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def describe_policy_rank(self, rank: int, facts: dict[str, Any]) -> None:
        """Write what a policy rank said of itself; they come in order. Raises as ``describe``."""
        before = _read(self.directory / "run.json").get("policy_ranks", [])[: rank - 1]
        fields: dict[str, Any] = {"policy_ranks": [*before, facts]}
        self.describe(**fields, **({"policy_rank": facts} if rank == 1 else {}))

    def ranks_met(self) -> int:
        """Number of policy ranks that rank 0 has met."""
        return len(_read(self.directory / "run.json").get("policy_ranks", []))

    def weights_digest(self) -> str:
        """Returns the SHA-256 of ``policy.weights``; empty: none, or not read yet."""
        return str(_read(self.directory / "run.json").get("weights_sha256") or "")

    def begin(
        self,
        *,
        config: dict[str, Any],
        config_sha256: str,
        versions: dict[str, str],
    ) -> None:
        """Write run.json as it is known at the start. Raises as ``describe``."""
        before = map(_number, _runs(self.directory.parent))
        self.describe(
            schema=SCHEMA,
            run_id=self.run_id,
            number=_number(self.directory) or 1 + max(before, default=0),
            created_utc=utc_now(),
            finished_utc=None,
            exit_code=None,
            **launcher_identity(os.getppid()),
            launcher_restarts=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            launcher_run_id=os.environ.get(LAUNCHER_RUN),
            config=config,
            config_sha256=config_sha256,
            versions=versions,
            native=native.is_used,
            hardware=hardware(),
            command=sys.argv,
            weights_sha256=None,  # of their file, once it is hashed
        )

    def finish(self, code: ExitCode) -> None:
        """Complete run.json: the run is over."""
        self.describe(finished_utc=utc_now(), exit_code=int(code))

    def returned(self, code: ExitCode) -> None:
        """Put into run.json what the launcher returns, where that is not rank 0's code.

        Raises as ``describe``.
        """
        if _read(self.directory / "run.json").get("exit_code", code) != code:
            self.describe(exit_code=int(code))

    @classmethod
    def joined(cls, directory: Path, keep: int) -> Run:
        """The run that rank 0 began.

        On another host its folder is made here, too, and of those that were made so all but
        ``keep`` are deleted.

        Raises:
            ConfigError: the folder cannot be made.
        """
        run = cls(directory)
        try:
            is_elsewhere = not directory.exists()
            directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            run.hold()
        except OSError as error:
            raise _cannot_write(directory, error) from error
        if is_elsewhere:
            with suppress(OSError):  # another run's rank was faster
                _delete_oldest(_joined_runs(directory.parent), keep)
        return run

    def stacks_path(self, rank: int, generation: int) -> Path:
        """Path for the stacks of a stuck rank."""
        return self.directory / f"rank{rank}.gen{generation}.stacks.txt"

    def record_exit(self, rank: int, code: ExitCode, reason: str, generation: int = 0) -> None:
        """Add this rank's end to exit.json."""
        end = {"code": int(code), "name": code.name, "reason": reason, "t": utc_now()}
        end["generation"] = generation
        with self._changing_ends() as ends:
            ends.pop(str(rank), None)  # they stand in the order in which they were recorded
            ends[str(rank)] = end

    def bear_loss(self, rank: int) -> None:
        """The run goes on without this rank: what ends the run later is not the rank's failure."""
        if str(rank) in self.ends():
            with self._changing_ends() as ends:
                ends[str(rank)]["is_borne"] = True

    @contextmanager
    def _changing_ends(self) -> Iterator[dict[str, Any]]:
        """Inside: exit.json, to be changed; ranks of one host may do so at the same moment."""
        with (self.directory / ".exit.lock").open("w") as lock:
            _lock(lock.fileno())
            path = self.directory / "exit.json"
            ends = _read(path)
            yield ends
            _write(path, ends)

    def ends(self) -> dict[str, dict[str, Any]]:
        """Returns the ends of this host's ranks so far, by rank, in the order they were recorded.

        Empty where none were.
        """
        return _read(self.directory / "exit.json")

    def first_to_fail(self, generation: int) -> tuple[int, dict[str, Any]] | None:
        """The rank of this host that failed first in a generation, with its end.

        One that left because another was lost, or had said why it leaves, is never it, nor one
        without which the run went on.
        """
        failed = (
            (int(rank), end)
            for rank, end in self.ends().items()
            if end["code"] not in (ExitCode.DRAINED, ExitCode.PEER_LOST)
            and not end["reason"].startswith(OTHER_LEFT)
            and end.get("generation") == generation
            and not end.get("is_borne")
        )
        return next(failed, None)

    def failed_before(self, rank: int, generation: int) -> tuple[int, PeerLeftError] | None:
        """The rank that failed first, and how it left; None if that is ``rank`` itself, or none."""
        first = self.first_to_fail(generation)
        if first is None or first[0] == rank:
            return None
        return first[0], PeerLeftError(first[1]["code"], first[1]["reason"])

    def is_untold(self, text: str, generation: int) -> bool:
        """True for the first rank of this host that asks, and where that cannot be told."""
        name = sha256(f"{generation} {text}".encode()).hexdigest()[:TOLD_DIGITS]
        try:
            (self.directory / f".told.{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # the folder is gone, or the disk is full
            return True
        return True

    def final_code(self) -> ExitCode | None:
        """Returns an earlier generation's exit code, when restarting cannot improve it."""
        codes = [ExitCode(end["code"]) for end in self.ends().values()]
        return next((code for code in codes if code in FINAL_CODES), None)


def boot_id() -> str:
    """Identifies this boot of this host: equal ids share CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def launcher_identity(pid: int) -> dict[str, Any]:
    """Identifies a launcher for ever: its number, when it began, and on which boot of the host."""
    return {"launcher_pid": pid, "launcher_start": start_time(pid), "boot_id": boot_id()}


def hardware() -> dict[str, Any]:
    """Returns the hardware that this run's numbers were measured on."""
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _point_latest(root: Path, directory: Path) -> None:
    link = root / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(directory.name)
    link.replace(root / "latest")


def _runs(root: Path) -> list[Path]:
    """Run folders, oldest first: by the number that each got, as the clock may have stood wrong."""
    folders = [path.parent for path in root.glob("*/run.json") if not path.parent.is_symlink()]
    return sorted(folders, key=lambda folder: (_number(folder), folder.name))


def _number(directory: Path) -> int:
    """Counts the runs of a root; 0: not begun yet, or by an older version."""
    number = _read(directory / "run.json").get("number")
    return number if isinstance(number, int) else 0


def _joined_runs(root: Path) -> list[Path]:
    """Folders of runs that rank 0 began on another host, by this one's clock oldest first."""
    folders = [path for path in root.iterdir() if RUN_NAME.fullmatch(path.name)]
    elsewhere = [path for path in folders if not (path / "run.json").exists()]
    return sorted(elsewhere, key=lambda path: path.stat().st_mtime_ns)


def _prune(root: Path, keep: int) -> None:
    """Delete the oldest runs beyond ``keep``; ``latest`` is the newest.

    A folder that has not the name of a run is the user's: a run that is kept, or another program's.
    """
    latest = (root / "latest").resolve().name
    runs = [run for run in _runs(root) if RUN_NAME.fullmatch(run.name)]
    _delete_oldest(sorted(runs, key=lambda run: run.name == latest), keep)


def _delete_oldest(runs: list[Path], keep: int) -> None:
    """Delete the first ones beyond ``keep``; those that go on are left alone."""
    for old in runs[: max(0, len(runs) - keep)]:
        with suppress(OSError):  # another rank's prune was faster, or it is another user's
            folder = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if not _goes_on(old, folder):
                    shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(folder)


def _goes_on(directory: Path, fd: int) -> bool:
    """True when a rank holds the folder, or will again: its launcher may be starting it anew."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    manifest = _read(directory / "run.json")
    pid, restarts = (manifest.get(f"launcher_{name}") for name in ("pid", "restarts"))
    return bool(restarts and pid and launcher_identity(pid).items() <= manifest.items())


def _lock(fd: int) -> None:
    """Lock a file for this process, or go on without: a rank that is stopped may hold it."""
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_PAUSE_S)


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    remedy = "make room, or set log.root elsewhere"
    return ConfigError([f"log.root: cannot write to {path}: {error.strerror}; {remedy}"])


def check_root(root: Path) -> None:
    """Make a folder where ``root`` is, or would be made, with folders of its names, and remove it.

    Raises:
        ConfigError: it cannot be made; permissions alone do not tell, as on a read-only disk.
    """
    there = nearest_there(root)
    names = [name for name in root.relative_to(there).parts if name != os.pardir]
    try:
        if names and (link := there / names[0]).is_symlink():
            raise FileExistsError(errno.EEXIST, f"{link} is a link to {link.readlink()}, not there")
        with tempfile.TemporaryDirectory(prefix=".ppstream-", dir=there) as tried:
            Path(tried, *names).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(root, error) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(_indented(content) + "\n")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _indented(content: dict[str, Any]) -> str:
    """JSON for people, in a quarter of the time that ``json`` takes to indent it."""
    text = json.dumps(content)
    try:
        return msgspec.json.format(text, indent=1)
    except msgspec.DecodeError:  # it reads no infinity and no lone surrogate
        return json.dumps(content, indent=1)


class EventLog:
    """The events of a log that another process writes; each call reads what came since the last.

    Args:
        log: the file of one rank and generation.
        last_bytes: of what is there already, so much is read; None: all of it.
    """

    def __init__(self, log: Path, last_bytes: int | None = None) -> None:
        self._log = log
        self._offset = 0 if last_bytes is None else max(0, log.stat().st_size - last_bytes)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the events, the last one last. All of them are read at once."""
        found: list[dict[str, Any]] = []
        with self._log.open("rb") as file:
            file.seek(self._offset)
            for line in file:  # hours of them may be too much for the memory
                if not line.endswith(b"\n"):  # it may not be complete
                    break
                self._offset += len(line)
                found += events_in(line)
        return iter(found)


def events_in(lines: bytes) -> Iterator[dict[str, Any]]:
    """Yields the events among a log's lines; a line that is cut is none."""
    for line in lines.splitlines():
        if b'"event"' in line:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("kind") == "event":
                    yield event
