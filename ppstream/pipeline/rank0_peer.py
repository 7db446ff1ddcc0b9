"""Paired: rank 0 with a policy rank behind it: what is said between them while a run goes on.

Envelopes are not sent here: that is the links' and the loops', ``stage0.py`` on a CPU and
``pipeline/device/stage0.py`` on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ppstream.control.peer_process import HeldProcess
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.errors import PeerLeftError, ProtocolError, WatchdogError
from ppstream.core.user_code import Fault
from ppstream.pipeline.rank0 import Rank0
from ppstream.wire.rank_messages import (
    Goodbye,
    Instructed,
    Instruction,
    Measure,
    Measured,
    PolicyFault,
)

if TYPE_CHECKING:
    from ppstream.control.peer import Peer
    from ppstream.pipeline.flight import Flight

POLICY_RANK: Final = 1
RESULT_SPARE_NS: Final = 2 * NS_PER_S  # the policy rank notices first: it knows more


class Paired(Rank0):
    """Rank 0 with a policy rank at the other end of ``peer``."""

    def __init__(self, *rank0_parts: Any, peer: Peer) -> None:
        super().__init__(*rank0_parts)
        self.peer = peer
        self.peer_log_refused = ""  # why its log could not be written, when it was asked last
        self._instructed: Callable[[int, str], None]  # set before anything can be answered
        self._frozen_ns = round(self.config.liveness.frozen_ms * NS_PER_MS)

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        self._instructed = done
        self.peer.send(Instruction(number, text))

    def take_frame(self, frame: object) -> None:
        """One control frame that is neither doorbell nor heartbeat.

        Raises:
            PeerLeftError: it says why the policy rank leaves.
        """
        match frame:
            case PolicyFault():
                fault = Fault(frame.kind, frame.kind, frame.what, frame.place, frame.text)
                self.log_fault("B", fault, POLICY_RANK, index=frame.index)
            case Instructed():
                self._instructed(frame.id, frame.fault)
                self.waiter.wake()
            case Goodbye():
                raise PeerLeftError(frame.code, frame.reason)

    def check_policy_rank(self, now: int, oldest: Flight | None, limit_ns: int) -> None:
        """Raise when the policy rank is silent, or a result overdue, for longer than allowed.

        Args:
            now: rank 0's clock.
            oldest: of the envelopes whose results are owed; None: none is.
            limit_ns: how long one may be.

        Raises:
            PeerFrozenError: nothing was heard of it.
            WatchdogError: a result is owed for too long.
        """
        if self.phase != "warming":
            self.peer.check_alive(now, self._frozen_ns)
        if oldest is None:
            return
        if self._drain_until_ns is not None and now > self._drain_until_ns:
            raise WatchdogError(
                f"results are owed from envelope {oldest.index} on "
                f"{self.config.liveness.drain_s:g} s after the run was asked to stop; raise "
                "liveness.drain_s if stage B takes so long"
            )
        if now - oldest.sent_ns > limit_ns + RESULT_SPARE_NS:
            raise WatchdogError(
                f"no result of envelope {oldest.index} for "
                f"{(limit_ns + RESULT_SPARE_NS) / NS_PER_S:.1f} s though the policy rank's heart "
                "beats: stage B, a device or the link is stuck"
            )

    def thread_cpus(self) -> dict[str, list[int]]:
        process = HeldProcess.at_end_of(self.peer.fileno())
        if process is None:  # the policy rank has a host of its own
            return {}
        try:
            return {"mesh": sorted(os.sched_getaffinity(process.pid))}
        except OSError:  # gone
            return {}
        finally:
            process.close()

    def newest_b(self, envelopes: int) -> Sequence[int]:
        """Device times of stage B on the newest envelopes; the policy rank's log is on disk."""
        self.peer.send(Measure(envelopes))
        frame = self.peer.receive(self._start_ns)
        while isinstance(frame, PolicyFault):
            self.take_frame(frame)
            frame = self.peer.receive(self._start_ns)
        if not isinstance(frame, Measured):
            raise ProtocolError(f"expected Measured from the policy rank, got {frame}")
        self.peer_log_refused = frame.log_refused
        return frame.durations_ns
