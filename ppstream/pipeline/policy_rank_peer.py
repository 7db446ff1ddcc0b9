"""PolicyRankPeer: the policy rank as rank 0 has it: what is said between them in a run.

Envelopes are not sent here: that is the links' and the executors'.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ppstream.control.peer_process import HeldProcess
from ppstream.control.watchdog import is_warm
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import PeerLeftError, PeerLostError, ProtocolError, WatchdogError
from ppstream.core.user_code import Fault
from ppstream.wire.rank_messages import (
    AskCompiled,
    CompilerCounts,
    Goodbye,
    Instructed,
    Instruction,
    Measure,
    Measured,
    PartTimes,
    PolicyFault,
)

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.control.peer import Peer
    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.mesh_faults import MeshFaults
    from ppstream.pipeline.rank0 import Rank0
    from ppstream.wire.rank_messages import Control

RESULT_SPARE_NS: Final = 2 * NS_PER_S  # the policy rank notices first: it knows more


Answer = TypeVar("Answer", Measured, CompilerCounts)


class TakesInstructions(Protocol):
    """The policy's parts at place 0."""

    def instruct(self, number: int, text: str) -> str: ...


class PolicyRankPeer:
    """The policy rank at the other end of ``peer``; for the thread that pumps it.

    Attributes:
        rank: its rank.
        bears_loss: the run may go on without it; asked where it cannot be reached.
        name_of: gives the index of the run to an index of its hops, or None where that is not
            known any more; set where these differ.
        is_member: of a mesh, and not its leader: no result is owed by it.
        log_refused: why its log could not be written, when it was asked last.
        parts_ns: mean duration of each part that runs there, when it was asked last.
    """

    def __init__(
        self,
        peer: Peer,
        config: PipelineConfig,
        rank: int = 1,
        mesh: MeshFaults | None = None,
    ) -> None:
        self.peer = peer
        self.rank = rank
        placement = config.placement
        self.bears_loss: Callable[[], bool] = lambda: False
        self.name_of: Callable[[int], int | None] = lambda index: index
        self.is_member = placement.leader_of(rank) != rank
        self._mesh = mesh
        self._resource = f"place{rank}" if placement.places > 1 else "mesh"
        if placement.replicas > 1:
            self._resource = f"replica{rank}"
        self.log_refused = ""
        self.parts_ns: dict[str, int] = {}
        self._rank0: Rank0  # set before a run begins
        self._asked: dict[int, Callable[[int, str], None]] = {}  # who waits, by a text's number
        self._is_forgotten = False
        self._frozen_ns = round(config.liveness.frozen_ms * NS_PER_MS)
        self._drain_s = config.liveness.drain_s

    def attach(self, rank0: Rank0) -> None:
        """The run that this policy rank serves."""
        self._rank0 = rank0

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """As ``Executor.instruct``; the answer comes as a frame."""
        self._asked[number] = done
        self.tell(Instruction(number, text))
        if self._is_forgotten:  # perhaps meanwhile, by another thread
            self.forget()

    def tell(self, frame: Control) -> None:
        """Send a frame, unless it is gone and will not be missed: who receives notices that."""
        try:
            self.peer.send(frame)
        except PeerLostError:
            if not self.bears_loss():
                raise

    def forget(self) -> None:
        """It is lost: nobody waits for its answers any more."""
        self._is_forgotten = True
        for number in [*self._asked]:
            self._answer_text(number, "")

    def _answer_text(self, number: int, fault: str) -> None:
        if (done := self._asked.pop(number, None)) is not None:
            done(number, fault)

    def on_control_frame(self, frame: object) -> None:
        """One control frame that is neither doorbell nor heartbeat.

        Raises:
            PeerLeftError: it says why the policy rank leaves.
        """
        match frame:
            case PolicyFault():
                fault = Fault(frame.kind, frame.kind, frame.what, frame.place, frame.text)
                if self._mesh is not None:
                    self._mesh.note(self.rank, frame.index, fault.line, now_ns())
                if not self.is_member:
                    index = self.name_of(frame.index)
                    name = {} if index is None else {"index": index}
                    self._rank0.log_fault("B", fault, self.rank, **name)
            case PartTimes():
                self.parts_ns = frame.times_ns
            case Instructed():
                self._answer_text(frame.id, frame.fault)
                self._rank0.waiter.wake()
            case Goodbye():
                raise PeerLeftError(frame.code, frame.reason)

    def check(self, now: int, oldest: Flight | None, limit_ns: int) -> None:
        """Raise when the policy rank is silent, or a result overdue, for longer than allowed.

        Args:
            now: rank 0's clock.
            oldest: of the envelopes whose results are owed; None: none is.
            limit_ns: how long one may be.

        Raises:
            PeerFrozenError: nothing was heard of it.
            MeshSplitError: some ranks of a mesh alone raised on an envelope.
            WatchdogError: a result is owed for too long.
        """
        if is_warm(self._rank0.phase):
            self.peer.check_alive(now, self._frozen_ns)
        if self._mesh is not None:
            self._mesh.check(now)
        if oldest is None or self.is_member:
            return
        drain_until_ns = self._rank0.drain_until_ns
        if drain_until_ns is not None and now > drain_until_ns:
            raise WatchdogError(
                f"results are owed from envelope {oldest.index} on "
                f"{self._drain_s:g} s after the run was asked to stop; raise "
                "liveness.drain_s if stage B takes so long"
            )
        if now - oldest.sent_ns > limit_ns + RESULT_SPARE_NS:
            raise WatchdogError(
                f"no result of envelope {oldest.index} for "
                f"{(limit_ns + RESULT_SPARE_NS) / NS_PER_S:.1f} s though the policy rank's "
                "heartbeats arrive: stage B, a device or the link is stuck"
            )

    def thread_cpus(self) -> dict[str, list[int]]:
        """CPUs that its process may use, where it is on this host."""
        process = HeldProcess.at_end_of(self.peer.fileno())
        if process is None:  # the policy rank has a host of its own
            return {}
        try:
            return {self._resource: sorted(os.sched_getaffinity(process.pid))}
        except OSError:  # gone
            return {}
        finally:
            process.close()

    def newest_b(self, envelopes: int) -> Sequence[int]:
        """Device times of stage B on the newest envelopes; the policy rank's log is on disk."""
        self.peer.send(Measure(envelopes))
        frame = self._answer(Measured)
        self.log_refused = frame.log_refused
        return frame.durations_ns

    def compiler_counts(self) -> dict[str, dict[str, int]]:
        """Counts of the compiler on the policy rank, by part."""
        self.peer.send(AskCompiled())
        return self._answer(CompilerCounts).parts

    def _answer(self, kind: type[Answer]) -> Answer:
        frame = self.peer.receive(self._rank0.start_ns)
        while isinstance(frame, PolicyFault | PartTimes | Instructed):
            self.on_control_frame(frame)
            frame = self.peer.receive(self._rank0.start_ns)
        if not isinstance(frame, kind):
            raise ProtocolError(f"expected {kind.__name__} from the policy rank, got {frame}")
        return frame


def instruct_all(
    policy_ranks: Sequence[PolicyRankPeer],
    front: TakesInstructions | None,
    number: int,
    text: str,
    done: Callable[[int, str], None],
) -> None:
    """As ``Executor.instruct``: rank 0's parts and all policy ranks have it, or the first fault."""
    waits = len(policy_ranks) + (front is not None)
    faults: list[str] = []
    answers = count(1)  # one at a time, whichever thread has it

    def on_instructed(number: int, fault: str) -> None:
        faults.append(fault)
        if next(answers) == waits:
            done(number, next(filter(None, faults), ""))

    if front is not None:
        on_instructed(number, front.instruct(number, text))
    for policy_rank in policy_ranks:
        policy_rank.instruct(number, text, on_instructed)


def thread_cpus(policy_ranks: Sequence[PolicyRankPeer]) -> dict[str, list[int]]:
    """CPUs that the process of each of them may use, by the resource that it is."""
    found: dict[str, list[int]] = {}
    for policy_rank in policy_ranks:
        found |= policy_rank.thread_cpus()
    return found
