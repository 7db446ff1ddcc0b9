"""Exceptions of user code as short text to show, log and send; how any exception ends a rank.

Policies and decoders may raise anything: an exception whose text raises, is no valid Unicode or
has 8 MB, a KeyboardInterrupt, ``sys.exit()``. Nothing here raises for it but ``UserExitError``. How
many results in a row may be unusable is ``stage_c.py``'s.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from ppstream.core.errors import (
    MAX_PLACE,
    MAX_TEXT,
    ExitCode,
    PolicyError,
    PpstreamError,
    StoppedEarlyError,
)

logger = logging.getLogger("ppstream")

REASON_MAX: Final = 1 << 16  # characters: a configuration may have many problems
WHAT_MAX: Final = 400  # characters of a type and its message
SHOWN_MAX: Final = 16  # kinds that one rank prints: user code can make up as many as it likes
FRAMES: Final = 20  # of a traceback, the innermost ones
CUT: Final = " ... (cut) ... "
CPU_MEMORY: Final = "can't allocate memory"  # torch has no type for it: a RuntimeError that says so
#: Code of others: where in it an exception was raised says less than who called it.
NOT_THE_USERS: Final = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parent.parent) + os.sep,
)


class UserExitError(PolicyError):
    """User code asked the whole process to leave; the message says who, with what, and where."""


class Fault(NamedTuple):
    """One failure of user code."""

    kind: str  # exception | memory | unwritten, or the action rule that was broken
    name: str  # of the exception's type, else the kind
    what: str  # in one line
    location: str = ""  # file, line and function; empty: nowhere in particular
    text: str = ""  # the traceback

    @property
    def line(self) -> str:
        """The fault and its place."""
        return f"{self.what} at {self.location}" if self.location else self.what


class FirstFaults:
    """Prints the first fault of each kind on standard error, with rank, stage and traceback."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: set[tuple[str, str, str]] = set()

    def report(self, stage: str, fault: Fault) -> bool:
        """Print it, if it is the first of its kind; returns whether it is."""
        key = stage, fault.kind, fault.name
        if key in self._seen or len(self._seen) >= SHOWN_MAX:
            return False
        self._seen.add(key)
        text = f"\n{fault.text.rstrip()}" if fault.text else ""
        arguments = self._rank, stage, fault.kind, fault.line, text
        logger.error("rank %d, stage %s: the first %s: %s%s", *arguments)
        return True


def fault_of(error: BaseException, who: str, kind: str = "") -> Fault:
    """Describes ``error``, which user code raised.

    Args:
        error: as it was caught.
        who: the user code, as ``the policy``.
        kind: what to call it; empty: ``memory`` or ``exception``.

    Raises:
        UserExitError: it was ``sys.exit()``, which asks for the end of the process.
    """
    location = location_of(error)
    if is_a(error, SystemExit):
        code = _safely(repr, getattr(error, "code", None))
        where = f" at {location}" if location else ""
        raise UserExitError(f"{who} called sys.exit({_cut(code, WHAT_MAX)}){where}") from None
    name = _clean(type(error).__name__)[:MAX_PLACE]
    message = message_of(error)
    if not kind:
        kind = "memory" if _is_memory(error, message) else "exception"
    what = _cut(" ".join(f"{name}: {message}".split()).removesuffix(":"), WHAT_MAX)
    return Fault(kind, name, what, location, traceback_of(error))


def is_a(error: BaseException, *types: type) -> bool:
    """As ``isinstance``, which asks the object itself and so may raise."""
    return issubclass(type(error), types)


def message_of(error: BaseException, most: int = MAX_TEXT) -> str:
    """The text of an exception, whatever its ``str()`` does: at most so many characters."""
    return _cut(_safely(str, error), most)


def traceback_of(error: BaseException) -> str:
    """The innermost frames and the message, with causes; at most ``MAX_TEXT`` characters."""
    return _cut(_safely(_format, error), MAX_TEXT)


def location_of(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame that is neither a library's nor ours."""
    if is_a(error, SyntaxError) and (file := getattr(error, "filename", None)):
        return _tail(_safely(str, f"{file}:{getattr(error, 'lineno', 0)}"))
    frames = [(step.tb_frame.f_code, step.tb_lineno) for step in _steps(error.__traceback__)]
    own = [found for found in frames if not found[0].co_filename.startswith(NOT_THE_USERS)]
    code, line = next(reversed(own or frames), (None, 0))
    return "" if code is None else _tail(_clean(f"{code.co_filename}:{line} in {code.co_name}"))


def _steps(step: TracebackType | None) -> list[TracebackType]:
    found = []
    while step is not None:
        found.append(step)
        step = step.tb_next
    return found


def _is_memory(error: BaseException, message: str) -> bool:
    names = {one.__name__ for one in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or CPU_MEMORY in message


def _format(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error, limit=-FRAMES))
    except BaseException:  # noqa: BLE001 - it asks the exception more than its text
        return "".join(traceback.format_tb(error.__traceback__, -FRAMES)) + type(error).__name__


def _safely(text_of: Any, value: object) -> str:
    """Returns text that user code makes of itself, which may raise anything."""
    try:
        return _clean(text_of(value))
    except BaseException as failure:  # noqa: BLE001 - sys.exit() in a __str__, too
        return f"<its text cannot be shown: {type(failure).__name__}>"


def _clean(text: str) -> str:
    """Text that can be encoded, and that no terminal takes for an order."""
    long = 16 * MAX_TEXT  # what is longer is cut anyhow
    if len(text) > long:
        text = text[: long // 2] + CUT + text[-long // 2 :]
    text = text.encode(errors="backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def _cut(text: str, most: int) -> str:
    """Beginning and end: frames stand in front of a long message, a message behind many frames."""
    if len(text) <= most:
        return text
    half = (most - len(CUT)) // 2
    return text[:half] + CUT + text[-half:]


def _tail(text: str) -> str:
    return text if len(text) <= MAX_PLACE else "..." + text[3 - MAX_PLACE :]


def how_it_ends(error: BaseException) -> tuple[ExitCode, str]:
    """Returns the exit code and reason for ``error``, in text that can be written and sent."""
    if isinstance(error.__context__, StoppedEarlyError):  # raised inside a lock it breaks that
        error = error.__context__
    if isinstance(error, PpstreamError | StoppedEarlyError):
        return error.exit_code, message_of(error, REASON_MAX)
    if isinstance(error, SystemExit):
        try:
            fault_of(error, "code of this rank")
        except UserExitError as left:
            error = left
        return ExitCode.POLICY_OUTPUT, str(error)
    text = message_of(error)
    if _is_memory(error, text):  # of torch's errors, too, as of a policy that is built
        return ExitCode.OUT_OF_MEMORY, text or "memory ran out on this rank"
    is_refused = isinstance(error, _device_refusals())
    return (
        ExitCode.POISONED if is_refused else ExitCode.INTERNAL,
        f"{type(error).__name__}: {text}",
    )


def _device_refusals() -> tuple[type[Exception], ...]:
    """Returns what kernels and torch (2.8 or newer) raise where a GPU refuses work; of what this
    process has loaded.
    """
    named = ("ppstream_kernels.kernel_launch", "DriverRefusedError"), ("torch", "AcceleratorError")
    found = (getattr(sys.modules.get(module), name, None) for module, name in named)
    return tuple(error for error in found if error is not None)
