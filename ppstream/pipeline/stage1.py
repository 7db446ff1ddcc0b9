"""THE loop of the policy rank: stage B, one envelope after the other, exactly one result each.

``StageB`` runs the policy on a slot; ``Stage1`` receives, runs, replies. The inline twin uses the
same ``StageB`` without a link.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from ppstream.control.watchdog import Mark, is_patient, stage_b_limit_ns, watched
from ppstream.core.clock import NS_PER_S, now_ns, thread_cpu_ns
from ppstream.core.cpus import RunDelay
from ppstream.core.errors import PeerLostError
from ppstream.links.headers import BEHIND_LINK, EPOCH, FAILURES
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.policy_rank import PolicyRank
from ppstream.pipeline.time_accounting import LINK, TimeBook
from ppstream.policy.protocol import told
from ppstream.policy.unwritten import INTEGERS, Outputs, failure, rebinding

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.factory import BackLink, Slot
    from ppstream.observe.log_writer import TimestampLog
    from ppstream.policy.protocol import Policy

WAIT_NS: Final = NS_PER_S // 10
EPISODE: Final = slice(0, 2)  # session, session_epoch: the columns of ``rows`` that name an episode


class StageB:
    """The policy behind one call; resets rows whose episode, or the run's epoch, changed.

    Args:
        policy: writes into host memory.
        rows: the batch B.
        integers: what integer outputs are filled with before each call.
    """

    def __init__(self, policy: Policy, rows: int, integers: int = INTEGERS) -> None:
        self._policy = policy
        self._inputs = [spec.name for spec in policy.inputs]
        self._episodes: list[list[int]] | None = None
        self._epoch = -1
        self._rows = rows
        self._integers = integers
        self._outputs: dict[int, Outputs] = {}  # of each slot

    def __call__(self, epoch: int, envelope: Slot, result: Slot) -> None:
        """Have the policy write every output of ``result``. Raises whatever the policy raises.

        Raises:
            UnwrittenError: the policy left an output, or a part of one, as it was.
        """
        # a list of numbers is compared at a tenth of what comparing tensors costs
        episodes = envelope.arrays["rows"][:, EPISODE].tolist()
        if self._episodes is None or epoch != self._epoch:
            self._reset([True] * self._rows)
        elif episodes != self._episodes:
            pairs = zip(episodes, self._episodes, strict=True)
            self._reset([new != old for new, old in pairs])
        self._episodes, self._epoch = episodes, epoch
        outputs = self._outputs.get(id(result)) or self._outputs_of(result)
        tensors = envelope.tensors
        outputs.fill()
        try:
            self._policy({name: tensors[name] for name in self._inputs}, outputs.given)
            outputs.hand_over(envelope.arrays["present"])
        except BaseException as error:
            del self._outputs[id(result)]  # as below
            if why := rebinding(error):
                raise why from error
            raise
        if outputs.is_kept():  # a thread of the policy's may yet write there: nobody shall read it
            del self._outputs[id(result)]

    def instruct(self, number: int, text: str) -> str:
        """Have the policy take in a text that rows will name by ``number``; the fault, or ''."""
        return told(self._policy, number, text)

    def _outputs_of(self, result: Slot) -> Outputs:
        outputs = self._outputs[id(result)] = Outputs(result, self._integers)
        return outputs

    def _reset(self, rows: list[bool]) -> None:
        self._policy.reset(torch.tensor(rows))


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
        self.mark = Mark("stage B", self._at)
        self._serving: tuple[int, int] | None = None  # epoch and seq of the newest envelope
        self._usual_b_ns = 0
        self.times = TimeBook()
        self.run_delay = RunDelay()
        self._previous_tb1 = 0
        self._waiting: deque[tuple[int, int]] = deque()  # envelopes that came, and when
        for fd in (peer.fileno(), *link.fds):
            waiter.register(fd)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """For the watchdog."""
        return (self.mark,)

    @property
    def standstill_ns(self) -> int:
        """How long the loop may stand still, as of now."""
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
        epoch, seq = envelope.header[EPOCH].tolist()
        self._serving = epoch, seq
        self.run_delay.enter()
        cpu_ns = thread_cpu_ns()
        tb0 = self.times.begin()
        failed = self.run_policy(index, epoch, envelope, result)
        tb1 = self.times.end()
        cpu_ns, delay_ns = thread_cpu_ns() - cpu_ns, self.run_delay.leave()
        self._usual_b_ns += (tb1 - tb0 - self._usual_b_ns) >> 3
        idle_ns = max(0, tb0 - self._previous_tb1) if self._previous_tb1 else 0
        wait_ns, busy_ns = self.times.take_ns("input"), self.times.take_ns(LINK)
        self._previous_tb1 = tb1
        # residence ends where the result is committed; the doorbell itself is the link's time
        residence_ns = now_ns() - complete_ns
        stamps = (tb0, tb1, tb1 - tb0, 0, wait_ns, 0, idle_ns, residence_ns, busy_ns)
        result.header[BEHIND_LINK] = (epoch, seq, failed, *stamps)
        self.link.reply(index)
        self.progress += 1
        self.write_line(epoch, seq, stamps, (cpu_ns, delay_ns), failed=failed)

    def run_policy(self, index: int, epoch: int, envelope: Slot, result: Slot) -> int:
        """Returns the header's ``failed``; rank 0 is told why before it gets the result."""
        self.link.arrivals.watch()
        if nvtx_ranges.on:
            nvtx_ranges.B.push(epoch, int(envelope.header[EPOCH][1]))
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
        self,
        epoch: int,
        seq: int,
        stamps: tuple[int, ...],
        of_cpu: tuple[int, int | None],
        *,
        failed: int,
    ) -> None:
        record = self.log.take()
        record.epoch, record.seq, record.phase = epoch, seq, self.phase
        record.tB0, record.tB1, _, _, record.wait_input_ns, record.wait_output_ns, *rest = stamps
        record.idle_ns, record.residence_ns, record.busy_link_ns = rest
        record.cpu_b_ns, record.delay_b_ns = of_cpu
        record.run_delay_ns = self.run_delay.take_ns()
        record.drop = FAILURES[failed]
        if self._meter is not None:
            record.recompiles = self._meter.take()
        self.log.commit(record)
