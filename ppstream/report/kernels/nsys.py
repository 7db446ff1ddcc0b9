"""Nsight Systems' sqlite export to ``kernel_trace.Trace``. Standard library only.

Tables are made by nsys only where there is something to put in, so each may be absent; what is
wrong with an export that cannot be used is said with the command that makes a right one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from ppstream.core.errors import LogError
from ppstream.report.kernels.trace import Copy, Trace, TraceRange, Work

MAGIC: Final = b"SQLite format 3\0"
KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
NVTX: Final = "NVTX_EVENTS"
RANGE_TYPES: Final = (59, 60)  # push/pop and start/end ranges
#: CUpti_ActivityMemcpyKind, where the export has no table of its own for them.
COPY_KINDS: Final = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
REPORTS: Final = (".nsys-rep", ".qdrep")


def read_nsys(path: Path) -> Trace:
    """The export in ``path``.

    Raises:
        LogError: stale, or not what ``nsys export --type sqlite`` writes, or without kernels.
    """
    _check_fresh(path)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as export:
        try:
            tables = {name for (name,) in export.execute("SELECT name FROM sqlite_master")}
            if KERNELS not in tables:
                raise LogError(
                    f"{path}: an export without {KERNELS}: no kernel ran, or CUDA was not traced; "
                    "profile with nsys profile --trace=cuda,nvtx,osrt"
                )
            return _trace(export, tables, path.name)
        except sqlite3.DatabaseError as error:
            raise LogError(f"{path}: the export is damaged ({error}): export it again") from error


def _check_fresh(path: Path) -> None:
    for suffix in REPORTS:
        report = path.with_suffix(suffix)
        if report.exists() and report.stat().st_mtime > path.stat().st_mtime:
            raise LogError(
                f"{path} is older than {report.name}: it shows an earlier run; "
                f"nsys export --type sqlite --force-overwrite true {report}"
            )


def _trace(export: sqlite3.Connection, tables: set[str], name: str) -> Trace:
    names = _pairs(export, "SELECT id, value FROM StringIds") if "StringIds" in tables else {}
    calls: dict[int, tuple[int, int]] = {}
    launch_ns = 0
    if RUNTIME in tables:
        query = f"SELECT correlationId, start, end, globalTid, nameId FROM {RUNTIME}"
        for correlation, start_ns, end_ns, thread, name_id in export.execute(query):
            calls[correlation] = start_ns, thread
            if "Launch" in names.get(name_id, ""):
                launch_ns += end_ns - start_ns
    return Trace(
        source=f"{name}, Nsight Systems",
        is_gpu=True,
        work=list(_kernels(export, names, calls)),
        copies=list(_copies(export, tables, calls)),
        ranges=list(_ranges(export, names)) if NVTX in tables else [],
        launch_ns=launch_ns,
    )


def _kernels(
    export: sqlite3.Connection, names: dict[int, str], calls: dict[int, tuple[int, int]]
) -> Iterator[Work]:
    shape = "gridX, gridY, gridZ, blockX, blockY, blockZ"
    query = (
        "SELECT start, end, deviceId, streamId, correlationId, shortName, demangledName, "
        f"{shape} FROM {KERNELS} ORDER BY start"
    )
    for start, end, device, stream, correlation, short, full, *launch in export.execute(query):
        called_ns, thread = calls.get(correlation, (None, None))
        yield Work(
            name=names.get(full) or names.get(short) or f"kernel {short}",
            start_ns=start,
            end_ns=end,
            busy_ns=end - start,
            lane=f"device {device} stream {stream}",
            shape=tuple(launch),
            launched_ns=called_ns,
            thread=thread,
        )


def _copies(
    export: sqlite3.Connection, tables: set[str], calls: dict[int, tuple[int, int]]
) -> Iterator[Copy]:
    kinds: dict[int, str] = dict(COPY_KINDS)
    if "ENUM_CUDA_MEMCPY_OPER" in tables:
        labels = _pairs(export, "SELECT id, label FROM ENUM_CUDA_MEMCPY_OPER")
        kinds |= {number: f"Memcpy {label}" for number, label in labels.items()}
    if MEMCPY in tables:
        query = f"SELECT copyKind, correlationId, bytes, start, end FROM {MEMCPY}"
        for kind, correlation, *about in export.execute(query):
            name = kinds.get(kind, f"Memcpy kind {kind}")
            yield Copy(name, *about, *calls.get(correlation, (None, None)))
    if MEMSET in tables:
        query = f"SELECT correlationId, bytes, start, end FROM {MEMSET}"
        for correlation, *about in export.execute(query):
            yield Copy("Memset", *about, *calls.get(correlation, (None, None)))


def _ranges(export: sqlite3.Connection, names: dict[int, str]) -> Iterator[TraceRange]:
    query = f"SELECT text, textId, start, end, globalTid FROM {NVTX} WHERE eventType IN (?, ?)"
    for text, text_id, start, end, thread in export.execute(query, RANGE_TYPES):
        if end is not None:
            yield TraceRange(text or names.get(text_id, "?"), start, end, thread)


def _pairs(export: sqlite3.Connection, query: str) -> dict[int, Any]:
    return dict(export.execute(query).fetchall())
