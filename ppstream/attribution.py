"""Where the time of stage B goes, block by block: for attribution, never for a score.

A policy names its blocks with ``with block("encode"):``; outside attribution mode, and outside a
profile, that costs one call and does nothing. In attribution mode each block waits for its device
at both ends, so its time is its own; that changes the schedule, and therefore every record carries
``mode = "attribution"``, which no gate accepts. Never name a block inside compiled code or a
recorded CUDA graph: it breaks the one and is not run in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.clock import now_ns

if TYPE_CHECKING:
    from ppstream.timestamps import TimestampLog

BLOCKS_MAX: Final = 256  # different names of one rank; later ones are timed as part of their outer
NAME_SEPARATOR: Final = "/"  # between an outer block and one within it

BlockOpener = Callable[[str], AbstractContextManager[object]]

_NOTHING: Final = nullcontext()
_open: BlockOpener | None = None


def block(name: str) -> AbstractContextManager[object]:
    """A named part of stage A, B or C, for the ``with`` statement; may stand within another."""
    return _NOTHING if _open is None else _open(name)


def give_blocks_to(opener: BlockOpener | None) -> None:
    """Who is asked for each block from now on; None: nobody."""
    global _open
    _open = opener


class Attribution:
    """Times the blocks of one rank between ``start`` and ``stop``, on the one thread with blocks.

    One ``blocks`` line for each envelope with any: ``{name: ns}``, outer names before the inner.
    """

    def __init__(self, log: TimestampLog, device: torch.device) -> None:
        self._log = log
        self._is_gpu = device.type == "cuda"
        self._device = device
        self._times_ns: dict[str, int] = {}
        self._names: dict[str, None] = {}  # in the order in which they were first entered
        self._path: list[str] = []

    def start(self) -> None:
        """From the next envelope on."""
        self._log.mode = "attribution"
        self._log.on_take = self._write
        give_blocks_to(self._block)

    def stop(self) -> None:
        self._log.mode = "throughput"
        self._log.on_take = None
        give_blocks_to(None)

    def line(self, line: Mapping[str, Any]) -> None:
        """As a watcher of its log: from ``bring-up`` to the next phase, between two envelopes."""
        if line.get("name") == "phase":
            self._log.on_take = self.start if line["phase"] == "bring-up" else self.stop

    def record(self, record: object) -> None:
        """Says nothing about the phase."""

    def _block(self, name: str) -> AbstractContextManager[object]:
        path = NAME_SEPARATOR.join((*self._path, name))
        if path not in self._names and len(self._names) >= BLOCKS_MAX:
            return _NOTHING
        self._names.setdefault(path)
        return _Block(self, name, path)

    def enter(self, name: str) -> int:
        """A block begins once its device has nothing else to do; returns when."""
        self._path.append(name)
        self._settle()
        return now_ns()

    def leave(self, path: str, began_ns: int) -> None:
        self._settle()
        self._path.pop()
        self._times_ns[path] = self._times_ns.get(path, 0) + now_ns() - began_ns

    def _settle(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def _write(self) -> None:
        if self._times_ns:
            found = {name: self._times_ns[name] for name in self._names if name in self._times_ns}
            self._log.line("blocks", blocks=found)
            self._times_ns = {}


class _Block:
    __slots__ = ("_began_ns", "_name", "_owner", "_path")

    def __init__(self, owner: Attribution, name: str, path: str) -> None:
        self._owner = owner
        self._name = name
        self._path = path
        self._began_ns = 0

    def __enter__(self) -> None:
        self._began_ns = self._owner.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owner.leave(self._path, self._began_ns)
