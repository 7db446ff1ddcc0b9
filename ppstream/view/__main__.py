"""``python -m ppstream.view``: as rank 0 starts it, or by hand on a named pipe of ``record.file``.

It ends with what it reads.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys
from collections.abc import Sequence
from typing import Final

from ppstream.core.errors import ConfigError, ExitCode

PORT: Final = 8765  # viewers offer it
MESSAGE_BYTES: Final = 64 << 10  # of the largest messages, where nobody says it
NICENESS: Final = 10  # the ranks come first


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the pipe ends; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ppstream.view", description="serves a run that is recorded to a pipe"
    )
    parser.add_argument("pipe", nargs="?", help="named pipe of record.file (default: the input)")
    parser.add_argument("--port", type=int, default=PORT, help=f"on loopback (default: {PORT})")
    text = "of the largest: a viewer that reads nothing keeps 64 MB of messages waiting"
    parser.add_argument("--message-bytes", type=int, default=MESSAGE_BYTES, help=text)
    args = parser.parse_args(argv)
    if args.pipe is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 drains, and then ends its pipe
        os.nice(NICENESS)
    try:
        _serve(args.pipe, args.port, max(1, args.message_bytes))
    except KeyboardInterrupt:
        return 0
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        return int(ExitCode.CONFIG)
    return 0


def _serve(path: str | None, port: int, message_bytes: int) -> None:
    try:
        from ppstream.view.live_view import serve
    except ModuleNotFoundError as error:
        reason = f"the live view needs {error.name}: pip install 'ppstream[view]'"
        raise ConfigError([reason]) from error
    try:
        with open(sys.stdin.fileno() if path is None else path, "rb") as pipe:
            if stat.S_ISREG(os.fstat(pipe.fileno()).st_mode):
                raise ConfigError([f"{path}: a file needs no live view: open it in the viewer"])
            serve(pipe, port, message_bytes)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error


if __name__ == "__main__":
    raise SystemExit(main())
