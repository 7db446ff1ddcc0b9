"""ResampleJob: a data set made input by input, by any number of processes, killed at any time.

Each input becomes a part, which appears under its number by one rename; a record beside it says
that it is whole. Who finds all parts there merges them. So whatever dies, the same command goes on
with what is missing, and no input is in the result twice. There is no other coordination: shards
share the folder alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ppstream.config.to_toml import as_toml
from ppstream.core.errors import ConfigError, ExitCode, PeerLostError
from ppstream.data.disk_space import writing
from ppstream.data.inputs import DataInput
from ppstream.data.lerobot_output import LeRobotOutput
from ppstream.data.outputs import (
    DataPart,
    DataSettings,
    OutputFormat,
    PreparedInput,
    check_cameras,
    prepare,
)
from ppstream.data.safetensors_output import SafetensorsOutput
from ppstream.report.formatting import size_text

STATE: Final = ".resample"  # in the output's folder
JOB: Final = "job.json"
COMPLETE: Final = "complete.json"
LOGGER: Final = "ppstream"
PRELOADED: Final = ("ppstream.data.job", "ppstream.data.cutting")  # that workers have in common

OnError = Literal["skip", "fail"]
Told = Callable[["InputRecord", int], None]


class InputRecord(NamedTuple):
    """An input's end."""

    number: int
    name: str
    fingerprint: list[int]  # size and time of change when it was read
    error: str = ""  # why it is not in the data set
    windows: int = 0
    too_short: int = 0  # stretches between two resets without a window
    notes: tuple[str, ...] = ()  # what its reader warned of
    summary: dict[str, Any] | None = None
    frames_left: dict[str, int] | None = None  # that stay in the recording, by topic


class JobEnd(NamedTuple):
    """State of a job when a process leaves it."""

    records: list[InputRecord]  # of all inputs that have an end, in order
    missing: int  # inputs that other shards still owe
    is_merged: bool


class ResampleJob:
    """A data set in the making.

    Args:
        out: its folder; made if need be.
        inputs: all of them, whatever shard this is.
        settings: of the data set.

    Raises:
        ConfigError: the folder holds something else, or a package is missing.
    """

    def __init__(self, out: Path, inputs: Sequence[DataInput], settings: DataSettings) -> None:
        self.out, self.inputs, self._settings = out, inputs, settings
        self._output = _output_of(settings)
        self._state = out / STATE
        described = {
            "format": settings.format,
            "content": settings.content,
            "task": settings.task,
            "config": as_toml(settings.config),
            "inputs": [one.name for one in inputs],
        }
        if settings.config.cameras:
            described["frames"] = settings.frames
        check_cameras(inputs, settings)
        text = json.dumps(described, indent=1)
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        job = self._state / JOB
        try:
            if out.exists() and not self._state.is_dir() and any(out.iterdir()):
                raise ConfigError(
                    [f"{out}: is not empty and no data set of this command; name another"]
                )
            self._state.mkdir(parents=True, exist_ok=True)
            if not job.exists():
                _replace(job, text)
            before = job.read_text()
        except OSError as error:
            raise ConfigError([f"{out}: cannot be written: {error.strerror or error}"]) from error
        if before != text:
            raise ConfigError(
                [f"{out}: holds a data set of other inputs, another configuration or format; "
                 "name another folder, or remove it"]
            )  # fmt: skip

    def run(self, numbers: Sequence[int], jobs: int, on_error: OnError, told: Told) -> JobEnd:
        """Make the parts of some inputs, and merge if none is missing then.

        Args:
            numbers: of this shard's inputs.
            jobs: processes; 1 works in this one.
            on_error: skip leaves out an input that cannot be read, fail ends the job.
            told: called with each input's end, and how many of the shard's have one by then.

        Raises:
            ConfigError: with ``fail``, an input cannot be read; or none of all can.
            PeerLostError: a worker process died.
            DataSetWriteError: the disk is full, or cannot be written; parts stay.
        """
        if self._is_complete():
            records = self._records()
            if len(records) == len(self.inputs):
                return JobEnd(records, 0, is_merged=True)
            (self._state / COMPLETE).unlink()  # an input has changed since
        have = {record.number for record in self._records() if not record.error}
        missing = [number for number in numbers if number not in have]
        done = len(numbers) - len(missing)
        for end, record in enumerate(self._made(missing, jobs), done + 1):
            told(record, end)
            if record.error and on_error == "fail":
                raise ConfigError([f"{record.name}: {record.error}"])
        records = self._records()
        if len(records) < len(self.inputs):
            return JobEnd(records, len(self.inputs) - len(records), is_merged=False)
        if all(record.error for record in records):
            raise ConfigError([f"{record.name}: {record.error}" for record in records])
        self._merge(records)
        return JobEnd(records, 0, is_merged=True)

    def _made(self, numbers: Sequence[int], jobs: int) -> Iterator[InputRecord]:
        work = [(self._state, number, self.inputs[number], self._settings) for number in numbers]
        if jobs == 1 or len(work) < 2:
            yield from (make_part(*one) for one in work)
            return
        with _workers(min(jobs, len(work))) as pool:
            try:
                with _uninterrupted():
                    waiting = {pool.submit(make_part, *one) for one in work}
                yield from _as_made(waiting)
            except BrokenProcessPool as error:
                raise PeerLostError(
                    "a worker process died, of memory or by a signal; parts that are made stay: "
                    "run the same command again, with fewer --jobs if memory ran out"
                ) from error

    def _records(self) -> list[InputRecord]:
        """Ends of inputs that have not changed since; until the merge with their parts."""
        found, is_complete = [], self._is_complete()
        for number, one in enumerate(self.inputs):
            about = _read_state(_record_file(self._state, number))
            if about is None:
                continue
            record = InputRecord(**about)
            part = _part_file(self._state, number, self._output.suffix)
            is_there = is_complete or record.error or part.exists()
            if is_there and record.fingerprint == fingerprint(one.path):
                found.append(record)
        return found

    def _is_complete(self) -> bool:
        about = _read_state(self._state / COMPLETE)
        if about is None:
            return False
        is_there = all((self.out / name).exists() for name in about.get("made", ()))
        return bool(is_there and about["digest"] == self._digest and about["skipped"] == 0)

    def _merge(self, records: Sequence[InputRecord]) -> None:
        with _alone(self._state / "lock"):
            if self._is_complete():
                return
            whole = [record for record in records if not record.error]
            parts = [
                DataPart(
                    self.inputs[record.number],
                    _part_file(self._state, record.number, self._output.suffix),
                    record.summary or {},
                )
                for record in whole
            ]
            skipped = len(records) - len(whole)
            with writing(self.out, lambda: self._unmerged(parts)):
                self._merge_parts(parts, skipped)
            if skipped == 0:  # else they are wanted again, once an input is mended
                for part in parts:
                    part.file.unlink(missing_ok=True)

    def _merge_parts(self, parts: Sequence[DataPart], skipped: int) -> None:
        for stale in self._state.glob("*.tmp"):  # of processes that were killed: all parts are here
            stale.unlink(missing_ok=True)
        merging = self._state / "merging"
        shutil.rmtree(merging, ignore_errors=True)
        try:
            merging.mkdir()
            self._output.merge(merging, parts)
            names = sorted(made.name for made in merging.iterdir())
            for made in sorted(merging.iterdir()):  # meta, by which it is opened, comes last
                old = self.out / made.name
                if old.is_dir():
                    shutil.rmtree(old)
                os.replace(made, old)
        finally:
            shutil.rmtree(merging, ignore_errors=True)
        complete = {"digest": self._digest, "skipped": skipped, "made": names}
        _replace(self._state / COMPLETE, json.dumps(complete))

    def _unmerged(self, parts: Sequence[DataPart]) -> str:
        have = sum(part.file.stat().st_size for part in parts)
        needed = self._output.merged_bytes(parts)
        more = f", merging them needs about {size_text(needed)} more" if needed else ""
        return f"all {len(parts)} inputs are written, {size_text(have)}{more}"


def make_part(state: Path, number: int, one: DataInput, settings: DataSettings) -> InputRecord:
    """Reads, resamples and writes one input, and records its end.

    Raises:
        DataSetWriteError: it cannot be written, which is no fault of the input.
    """
    seen = fingerprint(one.path)
    with _notes(one.path) as notes:
        try:
            prepared = prepare(one, settings)
        except (ConfigError, OSError) as error:
            record = InputRecord(number, one.name, seen, _text_of(error, one))
        else:
            with writing(state.parent, lambda: _parts_text(state)):
                record = _written(state, number, one, prepared, settings)
    record = record._replace(fingerprint=seen, notes=tuple(notes))
    with writing(state.parent, lambda: _parts_text(state)):
        _replace(_record_file(state, number), json.dumps(record._asdict()))
    return record


def _written(
    state: Path, number: int, one: DataInput, prepared: PreparedInput, settings: DataSettings
) -> InputRecord:
    output = _output_of(settings)
    file = _part_file(state, number, output.suffix)
    scratch = scratch_of(file)
    try:
        summary = output.write(scratch, prepared)
        os.replace(scratch, file)
    except ConfigError as error:  # of a frame, which is read only now
        return InputRecord(number, one.name, [], _text_of(error, one))
    finally:
        scratch.unlink(missing_ok=True)
    left = {t: n - summary["frames"].get(t, 0) for t, n in prepared.frames.items()}
    return InputRecord(
        *(number, one.name, [], "", prepared.windows, prepared.too_short),
        summary=summary,
        frames_left={topic: frames for topic, frames in left.items() if frames},
    )


def _output_of(settings: DataSettings) -> OutputFormat:
    """Raises ConfigError: the format needs a package that is missing."""
    if settings.format == "lerobot-v3":
        return LeRobotOutput(settings)
    return SafetensorsOutput(settings)


def _text_of(error: Exception, one: DataInput) -> str:
    return " ".join(str(error).removeprefix(f"{one.path}: ").split())


def _parts_text(state: Path) -> str:
    ends = [about for file in state.glob("[0-9]*.json") if (about := _read_state(file))]
    written = sum(1 for about in ends if not about["error"])
    return f"parts of {written} inputs are written, and stay"


def fingerprint(path: Path) -> list[int]:
    """Size and time of change of a file, or of the files of a folder."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    stats = [file.stat() for file in files]
    return [sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)]


def _as_made(waiting: set[Future[InputRecord]]) -> Iterator[InputRecord]:
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for one in done:
            yield one.result()


@contextmanager
def _workers(count: int) -> Iterator[Executor]:
    """Processes forked from one that has imported torch once and has no threads of ours."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    pool = ProcessPoolExecutor(count, context, _begin_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Has processes that begin in here leave Ctrl-C to this one: they end the input at hand."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    import torch

    torch.set_num_threads(1)  # the workers themselves fill the processors
    threading.Thread(target=_end_with_job, daemon=True).start()


def _end_with_job() -> None:
    """A job that is killed tells its workers nothing, and they would wait for inputs for ever."""
    job = parent_process()
    assert job is not None, "it runs in a worker"
    job.join()
    os._exit(ExitCode.PEER_LOST)


class _Notes(logging.Handler):
    def __init__(self, path: Path, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._path, self._notes = path, notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage().removeprefix(f"{self._path}: "))


@contextmanager
def _notes(path: Path) -> Iterator[list[str]]:
    """Collects what readers warn of."""
    notes: list[str] = []
    handler, logger = _Notes(path, notes), logging.getLogger(LOGGER)
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield notes
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _part_file(state: Path, number: int, suffix: str) -> Path:
    return state / f"{number:06d}{suffix}"


def _record_file(state: Path, number: int) -> Path:
    return state / f"{number:06d}.json"


def _read_state(file: Path) -> dict[str, Any] | None:
    """None where it is not there, or damaged: then its work is done again."""
    try:
        about: dict[str, Any] = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return about


def scratch_of(file: Path) -> Path:
    """A name beside ``file`` for what is to replace it: of this call alone, on whatever host."""
    return file.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _replace(file: Path, text: str) -> None:
    scratch = scratch_of(file)
    scratch.write_text(text)
    os.replace(scratch, file)
