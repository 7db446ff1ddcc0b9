"""torch.profiler on a running rank: wait, warm up, record, write one trace a cycle, leave.

Started by SIGUSR2 or after a number of envelopes; between profiles the loop asks one flag of its
log, as always, and nothing else of this is there. Operators are those of the thread that begins
envelopes (rank 0: stage A, and C with it unless the threads are split; a policy rank: stage B);
kernels are the whole device's. What is logged meanwhile has ``mode = "trace"``: no gate accepts it.
Writing a trace holds the loop up: robots hold, as for any other stall. Loading the profiler takes
seconds the first time: before the run begins where ``after`` is set, else beside the loop, which a
policy that launches kernel by kernel feels.

The profiler waits for the whole device when it stops. A loop that queues ahead of its device has
waits for the other rank queued there, and would wait for itself: so a profile begins, starts to
record and stops only when that loop is idle (``TimestampLog.when_idle``). Its trace has whole
envelopes alone, and those that were queued when it was to stop.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from ppstream.core.clock import now_ns
from ppstream.observe import attribution, nvtx_ranges

if TYPE_CHECKING:
    from ppstream.config.schema import ProfileConfig
    from ppstream.observe.log_writer import TimestampLog

logger = logging.getLogger("ppstream")

MS: Final = 1e-6  # per ns
TRACE_END: Final = 16  # bytes that hold its last brace
PREFIX: Final = "ppstream:"  # of stage steps and named blocks in a trace


class Profiler:
    """Profiles the loop that fills ``log``.

    Traces are ``DIRECTORY/profile.rankR.genG.N.json``, N counted from 0 over the whole generation.
    """

    def __init__(
        self, config: ProfileConfig, log: TimestampLog, directory: Path, rank: int, generation: int
    ) -> None:
        self._config = config
        self._log = log
        self._stem = directory / f"profile.rank{rank}.gen{generation}"
        self._written = 0
        self._cycles = 0  # still to come
        self._left = 0  # envelopes of the cycle that is running
        self._held_ns = 0  # how long the loop stood
        self._running: Any = None
        self.is_wanted = False

    def listen(self, *, takes_signals: bool = True) -> None:
        """Start ``config.after`` envelopes behind *ready*, and at SIGUSR2: from the main thread."""
        if takes_signals:
            signal.signal(signal.SIGUSR2, lambda *_: self.request())
        if self._config.after is not None:
            _load()
            self._log.watchers.append(self)

    def request(self) -> None:
        """Start soon, unless a profile is running or about to. For any thread."""
        if self.is_wanted:
            return
        self.is_wanted = True
        threading.Thread(target=self._prepare, name="profile", daemon=True).start()

    def _prepare(self) -> None:
        try:
            _load()
        except Exception:  # the top of a thread: a later request may succeed
            logger.exception("the profiler cannot be loaded")
            self.is_wanted = False
        else:
            self._log.on_acquire = self._ask

    def _ask(self) -> None:
        """Between two envelopes: begin as soon as nothing is queued."""
        self._log.on_acquire = None
        self._log.when_idle(self._begin)

    def line(self, line: Mapping[str, Any]) -> None:
        """Looks for *ready*: bring-up is not to be disturbed."""
        is_ready = line.get("name") == "phase" and line["phase"] == "ready"
        if is_ready and not self.is_wanted:  # else a signal was quicker
            self._left = self._config.after or 0
            self._log.on_acquire = self._count_down

    def record(self, record: object) -> None:
        """An envelope says nothing about the phase to come."""

    def _count_down(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._log.on_acquire = None
            self.request()

    def _begin(self) -> None:
        """The first cycle, of ``repeat`` ones."""
        self._cycles = self._config.repeat
        self._held_ns = 0
        self._log.mode = "trace"
        self._log.event("profile", state="begins", cycles=self._cycles)
        nvtx_ranges.annotate(_Annotation)
        attribution.set_block_opener(_annotated_block)
        # else a later call to CUDA takes the tracer out again, whatever is queued then
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        began = now_ns()
        self._cycle()
        self._held_ns += now_ns() - began

    def _cycle(self) -> None:
        config = self._config
        self._cycles -= 1
        self._left = config.wait + config.warmup + config.active
        self._running = profile(
            activities=_activities(),
            schedule=schedule(
                wait=config.wait, warmup=config.warmup, active=config.active, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=config.shapes,
            profile_memory=config.memory,
            with_stack=config.stacks,
        )
        self._running.start()
        _launch()
        self._log.on_acquire = self._step

    def _step(self) -> None:
        """One envelope more; where the profiler's state changes, once nothing is queued."""
        self._left -= 1
        if self._left in (self._config.warmup + self._config.active, self._config.active, 0):
            self._log.on_acquire = None
            self._log.when_idle(self._change)
        else:
            self._running.step()

    def _change(self) -> None:
        """Begin to warm up, to record, or stop and write."""
        began = now_ns()
        self._running.step()
        _launch()
        self._log.on_acquire = self._step
        if not self._left:
            self._running.stop()
            if self._cycles:
                self._cycle()
        self._held_ns += now_ns() - began
        if not self._left:
            self._end()

    def _end(self) -> None:
        nvtx_ranges.annotate(None)
        attribution.set_block_opener(None)
        self._running, self.is_wanted = None, False
        self._log.mode, self._log.on_acquire = "throughput", None
        self._log.event("profile", state="ended", held_ms=round(self._held_ns * MS, 1))

    def _write(self, ended: Any) -> None:
        path = Path(f"{self._stem}.{self._written}.json")
        self._written += 1
        ended.export_chrome_trace(str(path))  # which raises nothing where the disk is full
        if _is_whole(path):
            self._log.event("profile", state="written", file=path.name)
            logger.info("profile written to %s", path)
        else:
            path.unlink(missing_ok=True)
            self._log.event("profile", state="failed", file=path.name)
            logger.error("%s cannot be written whole: make room, then profile again", path)


def _is_whole(path: Path) -> bool:
    """True when the file is there to its last brace."""
    try:
        with path.open("rb") as file:
            file.seek(-min(TRACE_END, path.stat().st_size), os.SEEK_END)
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _load() -> None:
    """Load what the profiler's first start would load."""
    importlib.import_module("torch._inductor.config")


def _activities() -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(ProfilerActivity.CUDA)
    return found


def _launch() -> None:
    """A first launch under the tracer may load code, and wait for all that is queued: for nothing.

    One of torch's own kernels, on the current device.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def ignore_signal() -> None:
    """SIGUSR2 would end a process that does not listen; from the main thread."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class _Annotation:
    """One step of the loop as a range of the trace, on whichever thread takes it."""

    def __init__(self, name: str) -> None:
        self._name = PREFIX + name
        self._open: list[Any] = []

    def push(self, epoch: int, seq: int) -> None:
        self._open.append(record_function(self._name))
        self._open[-1].__enter__()

    def pop(self) -> None:
        if self._open:  # else it began before the profile did
            self._open.pop().__exit__(None, None, None)


def _annotated_block(name: str) -> AbstractContextManager[object]:
    return record_function(PREFIX + name)
