"""``ppstream fleet plan|up|status|drain|down``; each is imported when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from ppstream.core.errors import ConfigError, LogError
from ppstream.launch.commands import Command

COMMANDS: Final = {
    "plan": Command("ppstream.fleet.plan:main", "how many GPUs a fleet of robots needs"),
    "up": Command("ppstream.fleet.operate:up", "start the directory and the pipelines, on Ray"),
    "status": Command("ppstream.fleet.status:main", "show pipelines, phases and free rows"),
    "drain": Command("ppstream.fleet.operate:drain", "take one pipeline out"),
    "down": Command("ppstream.fleet.operate:down", "stop all"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """``ppstream fleet``: returns the exit code."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    command = COMMANDS[_parser().parse_args([name]).command]
    module, function = command.target.split(":")
    try:
        return int(getattr(import_module(module), function)(words))
    except (ConfigError, LogError) as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<7} {command.help}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="ppstream fleet",
        usage="ppstream fleet COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Many pipelines for many robots.",
        epilog="\n".join([*lines, "", "ppstream fleet COMMAND --help says more."]),
    )
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser
