"""``ppstream COMMAND``: one door to what users call; each command is a module of its own.

A module is imported when its command is called, so help and mistakes are answered at once. The
names with a hyphen (``ppstream-report``) call the same functions.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NamedTuple

from ppstream.core.errors import INTERRUPTED

USAGE_ERROR: Final = 2  # as argparse
READER_LEFT: Final = 128 + signal.SIGPIPE  # as a shell has it


class Command(NamedTuple):
    """A function that is called with the words behind the name, and returns the exit code."""

    target: str  # module:function
    help: str


COMMANDS: Final = {
    "init": Command("ppstream.launch.new_arm:main", "write a run, a policy and a robot that work"),
    "run": Command("ppstream.launch.launcher:main", "start the ranks of a run on this host"),
    "check": Command("ppstream.launch.launcher:check", "print what a run needs; start nothing"),
    "explain": Command("ppstream.config.explain:main", "what a configuration may say, and means"),
    "report": Command("ppstream.report.cli:main", "judge a run by its log, and say why it is slow"),
    "top": Command("ppstream.observe.top:main", "watch a run: phase, busy shares, ages, drops"),
    "replay": Command("ppstream.launch.replay:main", "stream a recording as a robot would"),
    "resample": Command("ppstream.data.cli:main", "make a data set of recordings"),
    "gateway": Command("ppstream.gateway.cli:main", "serve robots of openpi, GR00T and LeRobot"),
    "fleet": Command("ppstream.fleet.cli:main", "plan many pipelines; start and watch them on Ray"),
    "keys": Command("ppstream.wire.keys:main", "make and allow keys of robots on a network"),
    "export": Command("ppstream_stages.export:main", "write a run's policy as ONNX"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Call the command that the first word names; returns the exit code."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        from importlib.metadata import version  # here: no other command waits for it

        print(f"ppstream {version('ppstream')}")
        return 0
    if name not in COMMANDS:
        from ppstream.config.validate import suggestion  # here: help needs nothing installed

        hint = suggestion(name, tuple(COMMANDS))
        print(f"ppstream: there is no command {name!r}{hint}\n\n{_help()}", file=sys.stderr)
        return USAGE_ERROR
    module, function = COMMANDS[name].target.split(":")
    try:
        code = int(getattr(import_module(module), function)(words))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return READER_LEFT
    except KeyboardInterrupt:  # before the command takes signals itself, if it does
        if name != "run":
            return INTERRUPTED
        print("ppstream: exit 0 DRAINED SIGINT before the run was ready", file=sys.stderr)
        return 0  # as once its ranks start
    return code


def _reader_left() -> bool:
    """True when nobody reads standard output any more: head has seen enough."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _help() -> str:
    lines = [
        "usage: ppstream COMMAND ...",
        "",
        "Live sensors to actions over several ranks that are proven to overlap.",
        "",
        *(f"  {name:<9} {command.help}" for name, command in COMMANDS.items()),
        "",
        "ppstream COMMAND --help says more; under torchrun a rank is python -m ppstream.serve.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
