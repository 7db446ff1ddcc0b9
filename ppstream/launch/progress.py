"""Progress: says on stderr what a start waits for, and how far it is, where that takes a while.

On a terminal it is one line that is written again each second; in a pipe a line now and then. A
thread of its own reads what the main thread does, so that a call that blocks is named, too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, TextIO

from ppstream.core.clock import NS_PER_S, now_ns

PERIOD_S: Final = 1.0
SILENT_NS: Final = 2 * NS_PER_S  # no shorter wait is worth a word
PIPE_NS: Final = 10 * NS_PER_S  # between two lines where they stay
CLEAR: Final = "\r\x1b[K"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"  # what is longer than a terminal's line is cut


class Wait(NamedTuple):
    """A wait of the main thread."""

    what: str  # stays the same as long as it is the same wait
    detail: str = ""  # how far it is; empty: nobody knows, and the seconds are counted


class Progress:
    """A context manager around a start.

    Args:
        wait: what is waited for at a time, monotonic ns; None: nothing that is worth a word; it
            raises StopIteration when the start is over.
        who: the rank, for its lines.
        stream: where to.
    """

    def __init__(
        self, wait: Callable[[int], Wait | None], who: str, stream: TextIO | None = None
    ) -> None:
        self._wait = wait
        self._who = who
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._over = threading.Event()
        self._what = ""
        self._since_ns = 0
        self._said_ns = 0
        self._is_shown = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(PERIOD_S)

    def _run(self) -> None:
        with suppress(StopIteration):
            while not self._over.wait(PERIOD_S):
                self.tick(now_ns())
        self._clear()

    def tick(self, now: int) -> None:
        """Say what is waited for at ``now``, monotonic ns, if it is time to."""
        wait = self._wait(now)
        if wait is None or wait.what != self._what:
            self._clear()
            self._what, self._since_ns = "" if wait is None else wait.what, now
            self._said_ns = now + SILENT_NS - PIPE_NS
            return
        waited_ns = now - self._since_ns
        if waited_ns < SILENT_NS:
            return
        detail = wait.detail or f"for {waited_ns // NS_PER_S} s"
        text = f"ppstream: {self._who}: {wait.what}: {detail}"
        if self._is_terminal:
            self._write(f"{CLEAR}{NO_WRAP}{text}{WRAP}")
            self._is_shown = True
        elif now - self._said_ns >= PIPE_NS:
            self._write(f"{text}\n")
            self._said_ns = now

    def _clear(self) -> None:
        if self._is_shown:
            self._write(CLEAR)
            self._is_shown = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that was closed: the run goes on
            self._over.set()
