"""``ppstream fleet status``: the pipelines as the directory sees them, a table or JSON. No Ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from ppstream.core.errors import ConfigError
from ppstream.core.phases import SERVING
from ppstream.fleet import fleet_config
from ppstream.fleet.directory_server import DirectoryStatus
from ppstream.wire.directory_messages import STATUS
from ppstream.wire.http_answer import HTTP_OK, get_whole

ANSWER_LIMIT_S: Final = 2.0  # to the last byte
ANSWER_BYTES_MAX: Final = 1 << 24  # of some 10,000 pipelines
REFUSED: Final = 401
NOT_ALL: Final = 1
SEVERAL: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the status; 0: all pipelines of the file serve, 1: not all.

    Raises:
        ConfigError: the file is none, or no directory answers.
    """
    parser = argparse.ArgumentParser(
        prog="ppstream fleet status", description="Pipelines, their phases and their free rows."
    )
    parser.add_argument("fleet", type=Path, help="the fleet's TOML")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    plan = fleet_config.read(args.fleet)
    found = ask(f"http://{plan.fleet.directory.listen}", plan.token)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        Console().print(table(found))
        if line := other_weights(found):
            print(f"ppstream: warning: {line}", file=sys.stderr)
    serving = {row.report.pipeline for row in found.pipelines if row.phase in SERVING}
    return 0 if serving >= set(plan.fleet.pipeline_names()) else NOT_ALL


def ask(url: str, token: str | None) -> DirectoryStatus:
    """The directory's status.

    Raises:
        ConfigError: none answers there, or it wants another token.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        answer = get_whole(f"{url}{STATUS}", headers, ANSWER_LIMIT_S, ANSWER_BYTES_MAX)
        if answer.status == HTTP_OK:
            return msgspec.json.decode(answer.body, type=DirectoryStatus)
    except msgspec.DecodeError as error:
        raise ConfigError([f"{url}: answers, and is no directory: {error}"]) from error
    except (OSError, HTTPException) as error:
        raise ConfigError([f"{url}: no directory answers: {error}; ppstream fleet up"]) from error
    remedy = "; directory.token_file is not the directory's" if answer.status == REFUSED else ""
    raise ConfigError([f"{url}: answers HTTP {answer.status} {answer.reason}{remedy}"])


def other_weights(found: DirectoryStatus) -> str | None:
    """Returns which pipelines serve other weights than others; None: all have the same."""
    names: dict[str, list[str]] = {}
    for row in found.pipelines:
        if row.phase in SERVING:
            names.setdefault(row.report.weights or "none", []).append(row.report.pipeline)
    if len(names) < SEVERAL:
        return None
    have = "; ".join(f"{digest}: {', '.join(own)}" for digest, own in names.items())
    return (
        f"pipelines serve different policy.weights ({have}): a robot that changes its pipeline "
        "changes its network; give all one file, and start anew those that have another"
    )


def table(found: DirectoryStatus) -> Table:
    """One line for each pipeline."""
    made = Table()
    for name in ("pipeline", "phase", "robots", "free", "node", "endpoint", "starts", "last exit"):
        made.add_column(name, overflow="fold")  # an address is copied whole
    for row in found.pipelines:
        report = row.report
        phase = f"{row.phase}, draining" if row.is_draining and row.phase in SERVING else row.phase
        counts = f"{report.robots} of {report.rows}", str(row.free)
        where = report.node, report.endpoint
        made.add_row(report.pipeline, phase, *counts, *where, str(row.starts), row.last_exit)
    return made
