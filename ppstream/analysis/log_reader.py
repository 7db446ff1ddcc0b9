"""Run logs from disk: finds runs in a folder and reads each into a ``RunLog``.

Tolerates what a crash or a full disk leaves behind (torn lines, a rank without a file) and lines
with a number beyond any log's, and counts them; refuses what is no such log at all (other text, an
unknown format).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ppstream.analysis.log_parser import LogLine, check_schema, parse_run, ranks_of
from ppstream.analysis.records import Json, RunLog
from ppstream.core.errors import LogError
from ppstream.core.interpreter import uncollected

MANIFEST: Final = "run.json"
EXITS: Final = "exit.json"
#: ``rank0.gen0.jsonl``; anything between generation and suffix is a part of the same log.
_LOG_NAME: Final = re.compile(r"rank(\d+)\.gen(\d+)(?:\..+)?\.jsonl")
#: Beginnings of a line that was not written to its end: after a power cut zeros may stand there.
_TORN: Final = ("{", "\0")
NUMBER_CHARS: Final = 20  # of an integer of 64 bits
_GATEWAY_NAME: Final = re.compile(r"gateway()\.gen(\d+)\.jsonl")  # a file for each start


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


def read_run(folder: Path, generation: int | None = None) -> RunLog:
    """Read one run's ``run.json`` and rank files, finished or not.

    Args:
        folder: the run's.
        generation: only the rank files of this start, and none of a gateway, which counts its own
            starts; None: every file.

    Raises:
        LogError: a file is not readable, not in this format, or broken before its last line.
    """
    manifest = read_manifest(folder)
    files = {
        path: name
        for path, name in log_files(folder).items()
        if generation in (None, name.generation)
    }
    ranks = {name.rank for name in files.values()}
    if generation is None:
        files |= _files(folder, _GATEWAY_NAME)
    missing = tuple(rank for rank in range(ranks_of(manifest)) if rank not in ranks)
    torn: list[str] = []
    with uncollected():
        run = parse_run(
            manifest, read_lines(files, torn), missing_ranks=missing, exits=_exits(folder / EXITS)
        )
    return replace(run, torn_lines=len(torn))


def read_manifest(folder: Path) -> Json:
    """Read one run's ``run.json``.

    Raises:
        LogError: it cannot be read, or is no JSON object.
    """
    return _object(_text(folder / MANIFEST), f"{folder / MANIFEST}")


class LogFile(NamedTuple):
    """Owner of a log file."""

    rank: int
    generation: int


def log_files(folder: Path) -> dict[Path, LogFile]:
    """The rank files of a run, in order of the numbers in their names.

    Raises:
        LogError: there is no such folder.
    """
    return _files(folder, _LOG_NAME)


def _files(folder: Path, name: re.Pattern[str]) -> dict[Path, LogFile]:
    """Files by a pattern of rank and generation; a gateway's are rank 0's."""
    try:
        paths = sorted(folder.iterdir(), key=_in_numbers)
    except OSError as error:
        raise LogError(f"{folder}: cannot be read: {error.strerror}") from error
    return {
        path: LogFile(int(match[1] or 0), int(match[2]))
        for path in paths
        if (match := name.fullmatch(path.name))
    }


def _in_numbers(path: Path) -> list[str | int]:
    """Sorts ``gen2`` before ``gen10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]


def read_lines(files: Mapping[Path, LogFile], torn: list[str]) -> Iterator[LogLine]:
    """Every whole line of these files, one at a time; ``torn`` collects where the others stand.

    Raises:
        LogError: a file is not readable, or not in this format.
    """
    for path, name in files.items():
        yield from _lines(path, *name, torn)


def _exits(path: Path) -> Json:
    """The ends of the ranks so far; empty where a full disk tore the file."""
    if not path.is_file():
        return {}
    with suppress(LogError):
        return _object(_text(path), str(path))
    return {}


def _lines(path: Path, rank: int, generation: int, torn: list[str]) -> Iterator[LogLine]:
    """The file's lines, one at a time; ``torn`` collects those not written to their end."""
    name = str(path)
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                row = data.decode("utf-8", errors="replace")  # a tear may split a character
                fields = _plain_object(row, data)
                if fields is None or "schema" in fields:
                    fields = _fields(row, f"{name}:{number}", torn)
                if fields is not None:
                    yield LogLine(rank, generation, f"{name}:{number}", fields)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error


def _plain_object(row: str, data: bytes) -> Json | None:
    """The object of a whole row without a number so long that ``_integer`` must see it, or None.

    In a third of the time that ``_fields`` takes.
    """
    if data[:1] == b"{" and _LONG not in data.translate(_AS_ZEROS):
        try:
            found, end = _decode_short(row)
        except (ValueError, RecursionError):
            return None
        fields: Json = found
        return fields if row[end:] in ("\n", "") else None
    return None


def _fields(row: str, where: str, torn: list[str]) -> Json | None:
    """The row's object; None where there is none, or a torn one.

    Raises:
        LogError: it is not in this format.
    """
    if not row.strip():
        return None
    try:
        fields = _object(row, where)
    except LogError:
        if row.startswith(_TORN):
            torn.append(where)
            return None
        raise
    if "schema" in fields:
        check_schema(fields, where)
    return fields


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error


def decoded(text: str, where: str) -> Any:
    """Decodes JSON text.

    Raises:
        LogError: it is none, is nested too deeply, or has a number that no log has.
    """
    try:
        return _decode(text)
    except ValueError as error:
        raise LogError(f"{where}: not JSON: {error}") from error
    except RecursionError:
        raise LogError(f"{where}: not a log: its JSON is nested too deeply") from None


def _integer(text: str) -> int:
    """Refuses what no later arithmetic could hold: a float takes some 300 digits."""
    if len(text) > NUMBER_CHARS:
        raise ValueError(f"{text:.{NUMBER_CHARS}}... is no integer of 64 bits")
    return int(text)


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text:.{NUMBER_CHARS}} is no finite number")


_decode: Final = json.JSONDecoder(
    parse_int=_integer, parse_float=_finite, parse_constant=_finite
).decode
#: Of what has no number of so many digits, so that ``_integer`` need not see each one.
_decode_short: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).raw_decode
_LONG: Final = b"0" * NUMBER_CHARS
_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)


def _object(text: str, where: str) -> Json:
    value = decoded(text, where)
    if not isinstance(value, dict):
        raise LogError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _created(run: Path) -> str:
    try:
        return str(_object(_text(run / MANIFEST), str(run)).get("created_utc") or "")
    except LogError:
        return ""  # the reader of that run reports it
