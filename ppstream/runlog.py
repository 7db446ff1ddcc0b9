"""Run logs from disk: finds runs in a folder and reads each into a ``RunLog``.

Tolerates what a crash or a full disk leaves behind (torn lines, a rank without a file) and counts
it; refuses what is no such log at all (other text, an unknown format).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from ppstream.errors import LogError
from ppstream.log_lines import Line, check_schema, parse_run
from ppstream.records import Json, RunLog

MANIFEST: Final = "run.json"
#: ``rank0.gen0.jsonl``; anything between generation and suffix is a part of the same log.
_LOG_NAME: Final = re.compile(r"rank(\d+)\.gen(\d+)(?:\..+)?\.jsonl")


def find_runs(folder: Path) -> list[Path]:
    """The folder itself when it is a run, else the runs in it, newest last.

    Raises:
        LogError: no run there.
    """
    if (folder / MANIFEST).is_file():
        return [folder]
    inside = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    runs = {path.resolve() for path in inside if (path / MANIFEST).is_file()}  # latest is a link
    if not runs:
        raise LogError(f"{folder}: no run here; give a folder that holds {MANIFEST}, or its parent")
    return sorted(runs, key=lambda run: (_created(run), run.name))


def read_run(folder: Path) -> RunLog:
    """Read one run's ``run.json`` and rank files, finished or not.

    Raises:
        LogError: a file is not readable, not in this format, or broken before its last line.
    """
    manifest = _object(_text(folder / MANIFEST), f"{folder / MANIFEST}")
    lines: list[Line] = []
    torn = 0
    ranks = set()
    for path in sorted(folder.iterdir()):
        match = _LOG_NAME.fullmatch(path.name)
        if match is None:
            continue
        rank, generation = int(match[1]), int(match[2])
        ranks.add(rank)
        found, torn_here = _lines(path, rank, generation)
        lines += found
        torn += torn_here
    missing = tuple(rank for rank in _expected_ranks(manifest) if rank not in ranks)
    return parse_run(manifest, lines, torn_lines=torn, missing_ranks=missing)


def _lines(path: Path, rank: int, generation: int) -> tuple[list[Line], int]:
    """The file's lines, and how many were torn: begun as an object and never ended."""
    lines: list[Line] = []
    torn = 0
    for number, row in enumerate(_text(path).split("\n"), start=1):
        where = f"{path}:{number}"
        if not row.strip():
            continue
        try:
            fields = _object(row, where)
        except LogError:
            if row.startswith("{"):
                torn += 1
                continue
            raise
        if "schema" in fields:
            check_schema(fields, where)
        lines.append(Line(rank, generation, where, fields))
    return lines, torn


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")  # a tear may split a character
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error


def _object(text: str, where: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LogError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LogError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _created(run: Path) -> str:
    try:
        return str(_object(_text(run / MANIFEST), str(run)).get("created_utc") or "")
    except LogError:
        return ""  # the reader of that run reports it


def _expected_ranks(manifest: Json) -> range:
    topology = manifest.get("topology")
    size = topology.get("world_size") if isinstance(topology, dict) else None
    return range(size) if isinstance(size, int) else range(2)
