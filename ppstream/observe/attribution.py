"""Time of stage B block by block: for attribution, never for a score.

A policy names its blocks with ``with block("encode"):``; outside attribution mode, and outside a
profile, that costs one call and does nothing. In attribution mode each block waits at both ends for
what is queued before it, so its time is its own; that changes the schedule, and therefore every
record carries ``mode = "attribution"``, which no gate accepts. Inside compiled code, and in a CUDA
graph that is replayed, a block does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.core.clock import now_ns

if TYPE_CHECKING:
    from ppstream.observe.log_writer import TimestampLog

BLOCKS_MAX: Final = 256  # different names of one rank; later ones are timed as part of their outer
NAME_SEPARATOR: Final = "/"  # between an outer block and one within it

BlockOpener = Callable[[str], AbstractContextManager[object]]

_NOTHING: Final = nullcontext()
_open: BlockOpener | None = None


def block(name: str) -> AbstractContextManager[object]:
    """A named part of stage B or C, for the ``with`` statement; may stand within another."""
    if torch.compiler.is_compiling():  # asked first: compiled code must not depend on the mode
        return _NOTHING
    return _NOTHING if _open is None else _open(name)


def set_block_opener(opener: BlockOpener | None) -> None:
    """Sets the opener of each block from now on; None: blocks do nothing."""
    global _open
    _open = opener


def end_of_stream(device: torch.device) -> Callable[[], None]:
    """Returns a wait for the stream in use on ``device`` to be idle; on the CPU there is none.

    Never for the whole device: receipts that stand queued there wait for envelopes to come.
    """
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()


class Attribution:
    """Times the blocks of one rank between ``start`` and ``stop``, on any of its threads.

    One ``blocks`` line for each envelope with any: ``{name: ns}``, outer names before the inner.

    Args:
        log: of the rank.
        settle: waits for what the blocks have queued (``end_of_stream``).
    """

    def __init__(self, log: TimestampLog, settle: Callable[[], None]) -> None:
        self._log = log
        self._settle = settle
        self._times_ns: dict[str, int] = {}
        self._names: dict[str, None] = {}  # in the order in which they were first entered
        self._here = threading.local()  # its path: the blocks that a thread is in

    def start(self) -> None:
        """From the next envelope on."""
        self._log.mode = "attribution"
        self._log.on_acquire = self._write
        set_block_opener(self._block)

    def stop(self) -> None:
        self._log.mode = "throughput"
        self._log.on_acquire = None
        set_block_opener(None)

    def line(self, line: Mapping[str, Any]) -> None:
        """As a watcher of its log: from ``bring-up`` to the next phase, between two envelopes."""
        if line.get("name") == "phase":
            self._log.on_acquire = self.start if line["phase"] == "bring-up" else self.stop

    def record(self, record: object) -> None:
        """Says nothing about the phase."""

    def _block(self, name: str) -> AbstractContextManager[object]:
        path = NAME_SEPARATOR.join((*self._path(), name))
        if path not in self._names and len(self._names) >= BLOCKS_MAX:
            return _NOTHING
        self._names.setdefault(path)
        return _Block(self, name, path)

    def enter(self, name: str) -> int:
        """A block begins once what was queued before it is over; returns when."""
        self._path().append(name)
        self._settle()
        return now_ns()

    def leave(self, path: str, began_ns: int) -> None:
        self._settle()
        self._path().pop()
        self._times_ns[path] = self._times_ns.get(path, 0) + now_ns() - began_ns

    def _path(self) -> list[str]:
        found: list[str] | None = getattr(self._here, "path", None)
        if found is None:
            found = self._here.path = []
        return found

    def _write(self) -> None:
        if self._times_ns:
            times_ns, self._times_ns = self._times_ns, {}
            found = {name: times_ns[name] for name in list(self._names) if name in times_ns}
            self._log.line("blocks", blocks=found)


class _Block:
    __slots__ = ("_began_ns", "_name", "_owner", "_path")

    def __init__(self, owner: Attribution, name: str, path: str) -> None:
        self._owner = owner
        self._name = name
        self._path = path
        self._began_ns = 0

    def __enter__(self) -> None:
        self._began_ns = self._owner.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._owner.leave(self._path, self._began_ns)
