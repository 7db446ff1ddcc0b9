"""DeviceWindow: stage A on a GPU, one graph replay per window, straight into an envelope's slot.

What a window uses is decided on the GPU when the window runs, not when it is queued: the newest
samples sent by then, and the newest stamp of the reference stream as its end. The host learns of it
when the envelope is complete: ``take``. The CPU's twin, and the meaning of every tensor, is
``window.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.core.clock import NS_PER_S
from ppstream.core.clock import now_ns as clock_now_ns
from ppstream.core.errors import ProtocolError, WatchdogError
from ppstream.ingest.device.rings import DeviceRings
from ppstream.ingest.device.sample_blocks import commitment_shape
from ppstream.ingest.device.window_kernels import RECORDS, WindowKernels
from ppstream.ingest.device.window_records import TakenWindow, WindowBook
from ppstream.ingest.window import input_specs
from ppstream_kernels import cuda_rings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.ring import RingBank
    from ppstream.ingest.rows import RowInput

FIXED_LIMIT_NS: Final = 5 * NS_PER_S  # for a window whose end was given

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class Statistics(NamedTuple):
    """Since the start."""

    windows: int  # queued
    tables: int  # sent: how often the rings on the GPU changed
    refused: int  # times that copies were put off because all blocks were on their way


class DeviceWindow:
    """Cuts windows on ``device``; for the thread that writes the rings.

    ``inputs`` are the tensors of an envelope, as ``WindowCutter`` names and shapes them.

    Args:
        config: streams, window, groups and the lease of actions.
        rows: B places of robots.
        banks: the memory of their rings, by stream.
        device: where the slots are.
        is_limited: windows may be queued for the first rows alone.

    Raises:
        ConfigError: the frames' memory cannot be page-locked.
        RuntimeError: the kernels cannot be compiled or loaded.
    """

    def __init__(
        self,
        config: PipelineConfig,
        rows: Sequence[RowInput],
        banks: Mapping[str, RingBank],
        device: torch.device,
        *,
        is_limited: bool = False,
    ) -> None:
        self.inputs = input_specs(config)
        commitment = commitment_shape(config.actions)
        self.rings = DeviceRings(rows, banks, config.reference.name, device, commitment)
        self._kernels = WindowKernels(config, self.rings, len(rows), device, is_limited=is_limited)
        self._limits, self._rows = self._kernels.limits, len(rows)
        self._book = WindowBook(config, rows, self.rings.writer.reference)
        self._graphs: dict[int, cuda_rings.Recorded] = {}
        self._done: torch.cuda.Event = _cuda.Event()
        self._is_fixed = False  # the next window's ends were given: it must find nothing newer
        self._is_scheduled = False  # ends are given, of every window
        self._queued = 0
        self._taken = 0
        self._numbers = self._kernels.records.data
        self._used = -1, 0  # by the newest window: its table and its limit; and what they say
        self._made_of: TakenWindow

    def ingest(self, now_ns: int, ends_ns: Sequence[int | None] | None = None) -> bool:
        """Send what arrived; see ``DeviceRings.ingest``.

        With ``ends_ns`` the next window queued is the only one that uses them: what is sent later
        waits on the GPU until it has run. From then on nothing is sent without.

        Raises:
            WatchdogError: with ``ends_ns``, no block of memory came free for 5 s.
        """
        if self.is_idle:
            self.rings.unlock_gone()
        if ends_ns is None:
            return self._is_scheduled or self.rings.ingest()
        while not self.rings.ingest(ends_ns):
            if clock_now_ns() - now_ns > FIXED_LIMIT_NS:
                raise WatchdogError(
                    f"the GPU copied no samples for {FIXED_LIMIT_NS / NS_PER_S:g} s: windows "
                    "queued before this one do not run"
                )
        self._is_fixed = self._is_scheduled = True
        return True

    def rehearse(self) -> bool:
        """Do what it takes to send samples, and change nothing; returns as ``ingest``."""
        return self._is_scheduled or self.rings.rehearse()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Record the graph that writes this slot; to be done for each before a link opens."""
        self._graphs[tensors["rows"].data_ptr()] = self._kernels.record(tensors)

    @property
    def nodes(self) -> int:
        """Kernels of one window; 0 before any graph is recorded."""
        return max((graph.nodes for graph in self._graphs.values()), default=0)

    def graph(self, tensors: Mapping[str, Tensor]) -> int:
        """Returns the driver's handle of the graph that writes this slot, which is prepared."""
        return int(self._graphs[tensors["rows"].data_ptr()].graph)

    def enqueue(
        self,
        tensors: Mapping[str, Tensor],
        stream: torch.cuda.Stream,
        launch: Callable[[], None] | None = None,
        rows: int | None = None,
    ) -> None:
        """Queue the writing of every tensor of ``inputs``, in full, on ``stream``.

        Args:
            tensors: of a slot.
            stream: as follows.
            launch: of a graph that holds the slot's; None: that one alone is launched.
            rows: robots of the first ``rows`` alone are present, whoever comes until it runs; None:
                of all.

        Windows read memory of their own in turn: all calls name one stream, or streams that are
        ordered by other means. The calling thread's device is this one's.

        Raises:
            ProtocolError: more windows are queued than the host has memory to hear of.
        """
        if self._queued - self._taken >= RECORDS:
            raise ProtocolError(
                f"{RECORDS} windows are queued, none popped: call pop() for each complete one"
            )
        if self._limits is not None:
            self._limits[self._queued % RECORDS] = self._rows if rows is None else rows
        if launch is None:
            key = tensors["rows"].data_ptr()
            if key not in self._graphs:
                self.prepare(tensors)
            self.rings.order(stream)
            self._graphs[key].queue(stream.cuda_stream)
        else:
            self.rings.order(stream)
            launch()
        self._queued += 1
        if self._is_fixed:
            self._is_fixed = False
            self._done.record(stream)
            self.rings.hold(self._done)

    def pop(self) -> TakenWindow:
        """Returns the contents of the oldest queued window not yet taken; settles the ledgers.

        Windows of one table and limit are made of the same samples: they get the same object.

        Raises:
            ProtocolError: it has not run: the envelope's event was not waited for.
        """
        index = self._taken % RECORDS
        if self._numbers[index, 0] != self._taken or self._taken == self._queued:
            raise ProtocolError(f"window {self._taken} is not complete, {self._queued} are queued")
        self._taken += 1
        self.rings.let_go()
        limit = self._rows if self._limits is None else int(self._limits[index])
        if (used := (int(self._numbers[index, 1]), limit)) != self._used:
            words = self._kernels.records[index, cuda_rings.RECORD_WORDS :].tolist()
            self._used, self._made_of = used, self._book.account(words, limit)
        return self._made_of

    @property
    def table(self) -> int:
        """Number of the table, as ``DeviceRings.sequence`` counts, of the newest window popped."""
        return self._used[0]

    @property
    def is_idle(self) -> bool:
        """True when every window that was queued has been popped."""
        return self._taken == self._queued

    def statistics(self) -> Statistics:
        return Statistics(self._queued, self.rings.sequence, self.rings.refused)

    def close(self) -> None:
        """No window may be queued any more."""
        self.rings.close()
