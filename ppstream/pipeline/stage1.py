"""THE loop of the policy rank: stage B, one envelope after the other, exactly one result each.

``Stage1`` receives, has ``StageB`` run the policy on the slot, replies.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ppstream.control.watchdog import ProgressMark, is_patient, stage_b_limit_ns, watched
from ppstream.core.clock import NS_PER_S, now_ns, thread_cpu_ns
from ppstream.core.cpus import RunDelay
from ppstream.core.errors import PeerLostError
from ppstream.links.headers import (
    EPOCH,
    FAILED,
    FAILURES,
    SEQ,
    log_stage_b,
    new_stage_b,
    write_stage_b,
)
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.policy_rank import PolicyRank
from ppstream.pipeline.stage_b import StageB
from ppstream.pipeline.time_accounting import LINK, TimeAccount
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.protocol import BackLink
    from ppstream.links.slots import Slot
    from ppstream.observe.log_writer import TimestampLog

WAIT_NS: Final = NS_PER_S // 10


class Stage1(PolicyRank):
    """The policy rank's loop over ``link``; ends when rank 0 says drain."""

    def __init__(
        self,
        config: PipelineConfig,
        stage_b: StageB,
        link: BackLink,
        peer: Peer,
        log: TimestampLog,
        waiter: Waiter,
    ) -> None:
        super().__init__(config, stage_b, peer, log)
        self.stage_b = stage_b
        self.link = link
        self.waiter = waiter
        self.mark = ProgressMark("stage B", self._at)
        self._serving: tuple[int, int] | None = None  # epoch and seq of the newest envelope
        self._usual_b_ns = 0
        self.times = TimeAccount()
        self.run_delay = RunDelay()
        self._previous_tb1 = 0
        self._measured = new_stage_b()  # of the newest envelope
        self._waiting: deque[tuple[int, int]] = deque()  # envelopes that came, and when
        for fd in (peer.fileno(), *link.fds):
            waiter.register(fd)

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

    @watched
    def run(self, give_up: Callable[[], bool]) -> str:
        """Serve until rank 0 says drain; returns its reason.

        Raises:
            PeerLostError: rank 0 is gone, or ``give_up()`` while nothing was to be done.
        """
        self.run_delay.begin()
        while self.drain_reason is None:
            self.mark.turns += 1
            if not self._waiting:
                self.receive()
            if self.peer.inbox:  # first: envelopes may never let up
                self.take_frame(self.peer.inbox.popleft())
            elif self._waiting:
                self.serve(*self._waiting.popleft())
            elif give_up():
                raise PeerLostError("asked to stop, and rank 0 did not drain within its limit")
            else:
                self.wait()
        return self.drain_reason

    def receive(self) -> None:
        """Take every complete envelope, with the time it came."""
        self.peer.pump()
        indices = []
        while (index := self.link.receive_nowait()) is not None:
            indices.append(index)
        if indices:
            now = now_ns()
            self.peer.last_heard_ns = now  # an envelope is a sign of life
            self._waiting.extend(
                zip(indices, self.link.arrivals.take(len(indices), now), strict=True)
            )

    def serve(self, index: int, complete_ns: int) -> None:
        """Stage B on one envelope that was complete at ``complete_ns``, to committed result."""
        envelope, result = self.link.envelope(index), self.link.result(index)
        epoch, seq = envelope.header.item(EPOCH), envelope.header.item(SEQ)
        self._serving = epoch, seq
        self.run_delay.enter()
        cpu_ns = thread_cpu_ns()
        tb0 = self.times.begin()
        failed = self.run_policy(index, epoch, envelope, result)
        tb1 = self.times.end()
        cpu_ns, delay_ns = thread_cpu_ns() - cpu_ns, self.run_delay.leave()
        self._usual_b_ns += (tb1 - tb0 - self._usual_b_ns) >> 3
        measured, header = self._measured, result.header
        measured.tB0, measured.tB1 = tb0, tb1
        measured.idle_ns = max(0, tb0 - self._previous_tb1) if self._previous_tb1 else 0
        measured.wait_input_ns = self.times.take_ns("input")
        measured.busy_link_ns = self.times.take_ns(LINK)
        self._previous_tb1 = tb1
        # residence ends where the result is committed; the doorbell itself is the link's time
        measured.residence_ns = now_ns() - complete_ns
        header[EPOCH], header[SEQ], header[FAILED] = epoch, seq, failed
        write_stage_b(header, measured)
        self.link.reply(index)
        self.progress += 1
        self.write_line(epoch, seq, cpu_ns, delay_ns, failed=failed)

    def run_policy(self, index: int, epoch: int, envelope: Slot, result: Slot) -> int:
        """Returns the header's ``failed``; rank 0 is told why before it gets the result."""
        self.link.arrivals.watch()
        if nvtx_ranges.on:
            nvtx_ranges.B.push(epoch, int(envelope.header[SEQ]))
        try:
            self.stage_b(epoch, envelope, result)
        except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            self.tell_fault(index, error)
            return failure(error)
        finally:
            if nvtx_ranges.on:
                nvtx_ranges.B.pop()
            self.link.arrivals.rest()
        return 0

    def wait(self) -> None:
        began = self.times.begin()
        if self.phase != "warming":
            self.peer.check_alive(began, self._frozen_ns)
        self.waiter.wait(WAIT_NS)
        self.times.end("input")

    def measure(self, repeats: int) -> tuple[int, ...]:
        """The log is on disk: stage B's times stand there, and in each result's header."""
        self.log.flush()
        return ()

    def _at(self) -> str:
        return "" if self._serving is None else "epoch {}, seq {}".format(*self._serving)

    def write_line(
        self, epoch: int, seq: int, cpu_ns: int, delay_ns: int | None, *, failed: int
    ) -> None:
        record = self.log.take()
        record.epoch, record.seq, record.phase = epoch, seq, self.phase
        log_stage_b(self._measured, record)
        record.cpu_b_ns, record.delay_b_ns = cpu_ns, delay_ns
        record.run_delay_ns = self.run_delay.take_ns()
        record.drop = FAILURES[failed]
        if self._meter is not None:
            record.recompiles = self._meter.take()
        self.log.commit(record)
