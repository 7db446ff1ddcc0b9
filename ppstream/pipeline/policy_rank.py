"""THE loop of the policy rank: its phase, the frames it is sent, and how it ends.

How envelopes are answered is its forms': ``host_policy_rank.py`` over a link between CPUs,
``device/policy_rank.py`` on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from ppstream.control.watchdog import ProgressMark, is_patient, stage_b_limit_ns, with_watchdog
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.errors import PeerLeftError, PeerLostError
from ppstream.core.user_code import FirstFaults
from ppstream.policy.compiled import RecompileMeter, compiled_parts
from ppstream.policy.unwritten import policy_fault
from ppstream.wire.rank_messages import (
    AskCompiled,
    CompilerCounts,
    Drain,
    Goodbye,
    Instructed,
    Instruction,
    Measure,
    Measured,
    PartTimes,
    PhaseChange,
    PolicyFault,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.peer import Peer
    from ppstream.observe.log_writer import TimestampLog


class Instructable(Protocol):
    """Stage B, as far as texts go."""

    def instruct(self, number: int, text: str) -> str: ...


class PolicyRank(ABC):
    """One run on a policy rank, owned by the thread of its loop: exactly one result per envelope.

    Attributes:
        mark: of the loop, for the watchdog.
        progress: envelopes answered, read by the heartbeat.
        drain_reason: why the loop ends; None: it goes on.
        on_phase: told each phase that rank 0 has entered.
    """

    NAME = "stage B"  # of the loop's thread, to people

    def __init__(
        self,
        config: PipelineConfig,
        stage_b: Instructable,
        peer: Peer,
        log: TimestampLog,
        rank: int = 1,
    ) -> None:
        self.peer = peer
        self.log = log
        self.phase = "starting"
        self.progress = 0
        self.drain_reason: str | None = None
        self.on_phase: list[Callable[[str], None]] = []
        self.mark = ProgressMark(self.NAME, self._at)
        self._instructable = stage_b
        self._usual_b_ns = 0  # where the loop stands while stage B runs
        self._faults = FirstFaults(rank)
        self._meter = RecompileMeter.of(config.policy, stage_b)
        self._watchdog_ns = round(config.liveness.watchdog_s * NS_PER_S)
        self._start_ns = round(config.liveness.start_s * NS_PER_S)
        self._frozen_ns = round(config.liveness.frozen_ms * NS_PER_MS)

    @property
    def marks(self) -> tuple[ProgressMark, ...]:
        """For the watchdog."""
        return (self.mark,)

    @property
    def standstill_ns(self) -> int:
        """Time that the loop may stand still, as of now."""
        if is_patient(self.phase, self.log.mode):
            return self._start_ns
        return stage_b_limit_ns(self._watchdog_ns, self._usual_b_ns)

    @with_watchdog
    def run(self, give_up: Callable[[], bool]) -> str:
        """Serve until rank 0 says drain; returns its reason.

        Raises:
            PeerLostError: rank 0 is gone, or ``give_up()`` while nothing was to be done.
        """
        while self.drain_reason is None:
            self.mark.turns += 1
            if self.step():
                continue
            if self.peer.inbox:
                self.on_control_frame(self.peer.inbox.popleft())
            elif give_up():
                raise PeerLostError(
                    "this rank was asked to stop, and rank 0 did not drain within its limit"
                )
            else:
                self.wait()
        return self.drain_reason

    @abstractmethod
    def step(self) -> bool:
        """Take in what has come, and answer one envelope or book one that is over.

        Returns False when there is none, or a frame is to be taken first.
        """

    @abstractmethod
    def wait(self) -> None:
        """Sleep until something may have come; see that rank 0 is alive."""

    @abstractmethod
    def close(self) -> object:
        """Release what carries its envelopes."""

    @abstractmethod
    def _at(self) -> str:
        """Returns what the loop works on, for the watchdog."""

    @abstractmethod
    def measure(self, repeats: int) -> tuple[int, ...]:
        """Device times of stage B on the newest envelopes; with 0 the log is complete on disk."""

    def part_times(self, calls: int) -> dict[str, int]:
        """Mean duration of each part of the policy in the newest calls, where parts are timed."""
        return {}

    def change_phase(self, phase: str) -> None:
        """Rank 0 has entered it."""
        self.phase = phase
        self.log.event("phase", phase=phase)
        if self._meter is not None:
            self._meter.phase(phase, self.log.event)
        for tell in self.on_phase:
            tell(phase)

    def on_control_frame(self, frame: object) -> None:
        """One control frame that is neither doorbell nor heartbeat.

        Raises:
            PeerLeftError: it says why rank 0 leaves.
        """
        match frame:
            case Drain():
                self.drain_reason = frame.reason
            case Goodbye():
                raise PeerLeftError(frame.code, frame.reason)
            case PhaseChange():
                self.change_phase(frame.phase)
            case Instruction():
                fault = self._instructable.instruct(frame.id, frame.text)
                self.peer.send(Instructed(frame.id, fault))
            case AskCompiled():
                parts = compiled_parts(self._instructable)
                self.peer.send(CompilerCounts({part.name: part.counts for part in parts}))
            case Measure():
                durations_ns = self.measure(frame.repeats)
                if times_ns := self.part_times(frame.repeats):
                    self.peer.send(PartTimes(times_ns))
                self.peer.send(Measured(durations_ns, self.log.statistics().refused))

    def report_fault(self, index: int, error: BaseException) -> None:
        """The policy raised on envelope ``index``: rank 0 gets the fault before the result.

        Raises:
            UserExitError: it called ``sys.exit()``.
        """
        fault = policy_fault(error)
        text = fault.text if self._faults.report("B", fault) else ""
        self.peer.send(PolicyFault(index, fault.kind, text, fault.what, fault.location))
