"""Run folders: where logs, ``run.json`` and ``exit.json`` live. The only reader of wall time.

``logs/<run>/`` belongs to one run over all its restart generations; ``logs/latest`` points at it.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from ppstream.errors import FINAL_CODES, ConfigError, ExitCode

SCHEMA: Final = "ppstream.log/1"
ROBOT_STORY: Final = "robot.txt"  # what the embedded robot says at its end
DIRECTORY_MODE: Final = 0o750


def utc_now() -> str:
    """Wall time for people, never for arithmetic."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class Run:
    """One run's folder.

    Rank 0 creates it; every rank of the host adds its own end to ``exit.json``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_id = directory.name

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
            _point_latest(root, run.directory)
        except OSError as error:
            raise ConfigError(
                [f"log.root: cannot write to {root}: {error.strerror}; set log.root elsewhere"]
            ) from error
        _prune(root, keep)
        return run

    @classmethod
    def of_launcher(cls, root: Path) -> Run | None:
        """The run an earlier generation of this launcher (our parent process) began, if any."""
        for directory in reversed(_runs(root)):
            if _read(directory / "run.json").get("launcher_pid") == os.getppid():
                return cls(directory)
        return None

    def log_path(self, rank: int, generation: int) -> Path:
        return self.directory / f"rank{rank}.gen{generation}.jsonl"

    def describe(self, **fields: Any) -> None:
        """Merge ``fields`` into run.json; readers see the old file or the new one, never half."""
        path = self.directory / "run.json"
        _write(path, _read(path) | fields)

    def begin(
        self, *, config: dict[str, Any], config_sha256: str, versions: dict[str, str]
    ) -> None:
        """Write run.json as it is known at the start."""
        self.describe(
            schema=SCHEMA,
            run_id=self.run_id,
            created_utc=utc_now(),
            finished_utc=None,
            exit_code=None,
            launcher_pid=os.getppid(),
            config=config,
            config_sha256=config_sha256,
            versions=versions,
            hardware=hardware(),
            command=sys.argv,
        )

    def finish(self, code: ExitCode) -> None:
        """Complete run.json: the run is over."""
        self.describe(finished_utc=utc_now(), exit_code=int(code))

    @classmethod
    def joined(cls, directory: Path) -> Run:
        """The run that rank 0 began; on another host its folder is made here, too."""
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        return cls(directory)

    def stacks_path(self, rank: int, generation: int) -> Path:
        """Where the stacks of a stuck rank go."""
        return self.directory / f"rank{rank}.gen{generation}.stacks.txt"

    def record_exit(self, rank: int, code: ExitCode, reason: str, generation: int = 0) -> None:
        """Add this rank's end to exit.json; ranks of one host may do so at the same moment."""
        with (self.directory / ".exit.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self.directory / "exit.json"
            end = {"code": int(code), "name": code.name, "reason": reason, "t": utc_now()}
            end["generation"] = generation
            _write(path, _read(path) | {str(rank): end})

    def first_to_fail(self, generation: int) -> tuple[int, dict[str, Any]] | None:
        """The rank of this host that failed first in a generation, with its end.

        One that left because another was lost is never it.
        """
        ends = _read(self.directory / "exit.json").items()
        failed = [
            (end["t"], int(rank), end)
            for rank, end in ends
            if end["code"] not in (ExitCode.DRAINED, ExitCode.PEER_LOST)
        ]
        failed = [found for found in failed if found[2].get("generation") == generation]
        _, rank, end = min(failed, default=(None, -1, {}), key=lambda found: (found[0], found[1]))
        return (rank, end) if end else None

    def final_code(self) -> ExitCode | None:
        """How an earlier generation ended, when restarting cannot improve it."""
        codes = [ExitCode(end["code"]) for end in _read(self.directory / "exit.json").values()]
        return next((code for code in codes if code in FINAL_CODES), None)


def boot_id() -> str:
    """Identifies this boot of this host: equal ids share CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def hardware() -> dict[str, Any]:
    """What numbers of this run were measured on."""
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
    """Run folders, oldest first (names begin with the time)."""
    folders = (path.parent for path in root.glob("*/run.json"))
    return sorted(folder for folder in folders if not folder.is_symlink())


def _prune(root: Path, keep: int) -> None:
    runs = _runs(root)
    for old in runs[: max(0, len(runs) - keep)]:
        shutil.rmtree(old, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
