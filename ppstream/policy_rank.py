"""What the loops of a policy rank share: its phase, the frames it is sent, and how it ends.

How envelopes are answered is the loops': ``stage1.py`` on a CPU, ``stage1_device.py`` on a GPU.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

import torch

from ppstream.clock import NS_PER_MS, NS_PER_S
from ppstream.ends import PeerLeftError
from ppstream.messages import (
    MAX_TEXT,
    Drain,
    Goodbye,
    Instructed,
    Instruction,
    Measure,
    Measured,
    PhaseChange,
    PolicyFault,
)
from ppstream.policy_compile import RecompileMeter
from ppstream.unwritten import UnwrittenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.config import PipelineConfig
    from ppstream.control import Peer
    from ppstream.timestamps import TimestampLog

CPU_MEMORY: Final = "can't allocate memory"  # torch has no type for it: a RuntimeError that says so


class Instructable(Protocol):
    """Stage B, as far as texts go."""

    def instruct(self, number: int, text: str) -> str: ...


class PolicyRank(ABC):
    """State of one run on a policy rank, owned by the thread of its loop.

    Attributes:
        progress: envelopes answered, read by the heartbeat.
        drain_reason: why the loop ends; None: it goes on.
        on_phase: told each phase that rank 0 has entered.
    """

    def __init__(
        self, config: PipelineConfig, stage_b: Instructable, peer: Peer, log: TimestampLog
    ) -> None:
        self.peer = peer
        self.log = log
        self.phase = "starting"
        self.progress = 0
        self.drain_reason: str | None = None
        self.on_phase: list[Callable[[str], None]] = []
        self._instructable = stage_b
        self._meter = RecompileMeter() if config.policy.compile else None
        self._watchdog_ns = round(config.liveness.watchdog_s * NS_PER_S)
        self._start_ns = round(config.liveness.start_s * NS_PER_S)
        self._frozen_ns = round(config.liveness.frozen_ms * NS_PER_MS)

    @abstractmethod
    def measure(self, repeats: int) -> tuple[int, ...]:
        """Device times of stage B on the newest envelopes; with 0 the log is complete on disk."""

    def change_phase(self, phase: str) -> None:
        """Rank 0 has entered it."""
        self.phase = phase
        self.log.event("phase", phase=phase)
        if self._meter is not None:
            self._meter.phase(phase, self.log.event)
        for tell in self.on_phase:
            tell(phase)

    def take_frame(self, frame: object) -> None:
        """One control frame that is neither doorbell nor heartbeat.

        Raises:
            PeerLeftError: it says why rank 0 leaves.
        """
        match frame:
            case Drain():
                self.drain_reason = frame.reason
            case Goodbye():
                raise PeerLeftError(frame)
            case PhaseChange():
                self.change_phase(frame.phase)
            case Instruction():
                fault = self._instructable.instruct(frame.id, frame.text)
                self.peer.send(Instructed(frame.id, fault))
            case Measure():
                self.peer.send(Measured(self.measure(frame.repeats)))

    def tell_fault(self, index: int, error: Exception) -> None:
        """The policy raised on envelope ``index``: rank 0 hears why before it has the result."""
        text = "".join(traceback.format_exception(error))[-MAX_TEXT:]
        self.peer.send(PolicyFault(index, fault_kind(error), text))


def fault_kind(error: Exception) -> str:
    """What a policy's exception is called in the log: ``unwritten``, ``memory``, ``exception``."""
    if isinstance(error, UnwrittenError):
        return "unwritten"
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return "memory" if is_memory or CPU_MEMORY in str(error) else "exception"
