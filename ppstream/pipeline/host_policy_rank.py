"""The policy rank over a link between CPUs: receives, runs the policy on the slot, replies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream.control.watchdog import is_patient, is_warm
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.cpus import RunDelay, StageCost
from ppstream.core.errors import PeerLostError
from ppstream.core.realtime import timeouts_on_time
from ppstream.core.user_code import message_of
from ppstream.links.headers import (
    EPOCH,
    FAILED,
    FAILURES,
    RESULT_HEADER,
    SEQ,
    add_places,
    log_stage_b,
    new_stage_b,
    write_stage_b,
)
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.keep_warm import KeepWarm
from ppstream.pipeline.mesh_faults import is_lost_connection, waits_for_collective, waits_for_gpu
from ppstream.pipeline.policy_rank import PolicyRank
from ppstream.pipeline.stage_b import StageB
from ppstream.pipeline.time_accounting import LINK, TimeAccount
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.protocol import Hops
    from ppstream.links.slots import Slot
    from ppstream.observe.log_writer import TimestampLog

WAIT_NS: Final = NS_PER_S // 10
SHORT_B_NS: Final = 2 * NS_PER_MS  # of longer ones some 0.1 ms is no part
COLD_NS: Final = NS_PER_MS  # since the newest envelope
LINGER_NS: Final = 100_000  # behind a rouse: rank 0 cuts a window in less
LOOK_NS: Final = 100_000  # for a peer that speaks while an envelope is expected
#: So long an account waits for a pause: by then the robot, which may share this CPU, has its chunk.
ACCOUNT_NS: Final = NS_PER_MS
MESH_SPARE_NS: Final = NS_PER_S


class _Answered(NamedTuple):
    """The newest envelope, beside what its result's header has."""

    began_ns: int
    took_ns: int
    committed_ns: int
    failed: int  # as its result says, and the envelope itself
    was_failed: int


class HostPolicyRank(PolicyRank):
    """Stage B between two hops, one envelope after the other."""

    def __init__(
        self,
        config: PipelineConfig,
        stage_b: StageB,
        hops: Hops,
        peer: Peer,
        log: TimestampLog,
        waiter: Waiter,
        rank: int = 1,
        part_times: Callable[[int], dict[str, int]] = lambda _calls: {},
    ) -> None:
        super().__init__(config, stage_b, peer, log, rank)
        self._part_times = part_times
        self.stage_b = stage_b
        self.out, self.into = hops.out, hops.into
        self._close = hops.close
        self.waiter = waiter
        self._ready: Sequence[int] | None = ()  # named by the newest wait; None: looked at
        self._serving: tuple[int, int] | None = None  # epoch and seq of the newest envelope
        self.times = TimeAccount()
        self.run_delay = RunDelay()
        self._cost = StageCost(self.run_delay)
        self._previous_tb1 = 0
        self._warm_ns = 0  # when code and data of stage B were last used
        self.measured = new_stage_b()  # of the newest envelope
        self._answered: _Answered | None = None  # until it is accounted for
        self._scratch = memoryview(bytearray(8 * len(RESULT_HEADER))).cast("q")
        self._waiting: deque[tuple[int, int]] = deque()
        self._is_first = config.placement.place_of(rank) == 1
        self._is_in_mesh = config.placement.mesh > 1
        if self._is_in_mesh:
            self.mark.name = f"stage B on rank {rank}"
        self._waited_turn = -1  # the newest in which another rank of the mesh was waited for
        self._newest_b: deque[int] = deque(maxlen=config.bringup.standalone)  # durations
        self._keep_warm = KeepWarm(log, self._warm_up, look_ns=LOOK_NS)
        self._peer_fd = peer.fileno()
        waiter.register(self._peer_fd)
        hops.into.register_with(waiter)

    def run(self, give_up: Callable[[], bool]) -> str:
        """As ``PolicyRank``, on the thread that waits and works."""
        self.run_delay.begin()
        try:
            with timeouts_on_time():
                return super().run(give_up)
        finally:
            self._account()

    def step(self) -> bool:
        """As ``PolicyRank``. Frames first: envelopes may never let up."""
        if not self._waiting:
            self.receive()
        if self.peer.inbox or not self._waiting:
            return False
        self.serve(*self._waiting.popleft())
        return True

    def receive(self) -> None:
        """Take the oldest complete envelope; read the control socket if the wait has named it."""
        ready, self._ready = self._ready, None
        if ready is not None:
            if not ready or self._peer_fd in ready:
                self.peer.pump()
            self.into.on_ready(ready)
        if not self._take() and ready and self._peer_fd not in ready:
            self._get_ready()

    def _take(self) -> bool:
        if (arrival := self.into.receive_nowait()) is None:
            return False
        self._waiting.append(arrival)
        _, rung_ns = arrival  # a sign of life; the heart may have beaten since
        self.peer.last_heard_ns = max(self.peer.last_heard_ns, rung_ns)
        return True

    def _get_ready(self) -> None:
        """Roused: rank 0 cuts an envelope's window. What stage B takes is brought into the caches.

        Then it looks for the envelope and does not sleep: to be woken takes as long as that cut.
        """
        self._account()
        if self._usual_b_ns > SHORT_B_NS:
            return
        if now_ns() - self._warm_ns > COLD_NS:
            self._warm_up()
        until_ns = now_ns() + LINGER_NS
        while not self._take() and now_ns() < until_ns:
            pass

    def _warm_up(self) -> None:
        """Do what the newest envelope took, but for the policy: for nobody."""
        self._account()
        if self._usual_b_ns <= SHORT_B_NS:
            self.stage_b.get_ready()
            write_stage_b(self._scratch, self.measured)
            self._warm_ns = now_ns()

    def serve(self, index: int, complete_ns: int) -> None:
        """Stage B on one envelope that was complete at ``complete_ns``, to committed result."""
        self._account()
        envelope, result = self.into.slot(index), self.out.slot(index)
        given = envelope.words
        epoch, seq = given[EPOCH], given[SEQ]
        self._serving = epoch, seq
        self._cost.enter()
        tb0 = self.times.begin()
        failed = given[FAILED] or self.run_policy(index, epoch, envelope, result)
        tb1 = self.times.end()
        self._cost.leave(tb1 - tb0)
        measured, words = self.measured, result.words
        measured.tB0, measured.tB1 = tb0, tb1
        idle_since_ns = self._previous_tb1
        measured.idle_ns = max(0, tb0 - idle_since_ns) if idle_since_ns else 0
        measured.wait_input_ns = self.times.pop_ns("input")
        measured.busy_link_ns = self.times.pop_ns(LINK)
        self._previous_tb1 = self._warm_ns = tb1
        # residence ends where the result is committed; the doorbell itself is the link's time
        committed_ns = now_ns()
        measured.residence_ns = committed_ns - complete_ns
        words[EPOCH], words[SEQ], words[FAILED] = epoch, seq, failed
        write_stage_b(words, measured)
        if not self._is_first:
            add_places(words, given)
        was_failed = given[FAILED]
        self.out.commit(index)
        self._answered = _Answered(tb0, tb1 - tb0, committed_ns, failed, was_failed)
        self.progress += 1
        if tb0 - idle_since_ns < COLD_NS:  # no pause is to be expected, and it takes little now
            self._account()

    def _account(self) -> None:
        """Account for the newest envelope, unless that was done."""
        if (answered := self._answered) is None or self._serving is None:
            return
        self._answered = None
        self.stage_b.settle()
        self._keep_warm.began(answered.began_ns)
        self._usual_b_ns += (answered.took_ns - self._usual_b_ns) >> 3
        self._newest_b.append(answered.took_ns)
        record = self.log.acquire()
        (record.epoch, record.seq), record.phase = self._serving, self.phase
        log_stage_b(self.measured, record)
        record.tOut = answered.committed_ns
        record.cpu_b_ns, record.delay_b_ns = self._cost.cpu_ns, self._cost.delay_ns
        record.run_delay_ns = self.run_delay.pop_ns()
        record.drop = FAILURES[answered.failed]
        record.rows = None if answered.was_failed else self.stage_b.computed
        if self._meter is not None:
            record.recompiles = self._meter.drain()
        self.log.commit(record)

    def on_control_frame(self, frame: object) -> None:
        """As ``PolicyRank``; a phase that it begins is not that of the newest envelope."""
        self._account()
        super().on_control_frame(frame)

    def run_policy(self, index: int, epoch: int, envelope: Slot, result: Slot) -> int:
        """Returns the header's ``failed``; rank 0 is told why before it gets the result."""
        if nvtx_ranges.on:
            nvtx_ranges.B.push(epoch, envelope.words[SEQ])
        try:
            self.stage_b(epoch, envelope, result)
        except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            self.report_fault(index, error)
            return failure(error)
        finally:
            if nvtx_ranges.on:
                nvtx_ranges.B.pop()
        return 0

    def report_fault(self, index: int, error: BaseException) -> None:
        """As ``PolicyRank``.

        Raises:
            PeerLostError: what failed is a collective, because another rank of the mesh is gone.
        """
        if self._is_in_mesh and is_lost_connection(error):
            raise PeerLostError(f"a rank of the mesh is gone: {message_of(error)}") from error
        super().report_fault(index, error)

    @property
    def standstill_ns(self) -> int:
        """As ``PolicyRank``; who waits for another rank of a mesh is never named first.

        Nor who has waited since its mark moved: when that rank ends, what the collective then
        raises may take a while to arrive.
        """
        limit_ns = super().standstill_ns
        if not self._is_in_mesh:
            return limit_ns
        turn = self.mark.turns
        if waits_for_collective(self.mark.thread_id) or (
            not is_patient(self.phase, self.log.mode)  # before, graphs are being recorded
            and waits_for_gpu()
        ):
            self._waited_turn = turn
        return limit_ns + MESH_SPARE_NS * (self._waited_turn == turn)

    def close(self) -> None:
        """As ``PolicyRank``."""
        self._close()

    def wait(self) -> None:
        """As ``PolicyRank``."""
        began = self.times.begin()
        if is_warm(self.phase):
            self.peer.check_alive(began, self._frozen_ns)
        if self._answered is not None and not self._keep_warm.expects(self.phase):
            self._ready = self.waiter.wait(ACCOUNT_NS)
            self.times.end("input")
            if self._ready or self.waiter.woken:
                return
            self._account()
            self.times.begin()
        self._ready = self._keep_warm.wait(self.waiter, WAIT_NS, self.phase)
        self.times.end("input")

    def measure(self, repeats: int) -> tuple[int, ...]:
        """As ``PolicyRank``, by the host's clock."""
        self.log.flush()
        return tuple(self._newest_b)

    def part_times(self, calls: int) -> dict[str, int]:
        """As ``PolicyRank``."""
        return self._part_times(calls)

    def _at(self) -> str:
        return "" if self._serving is None else "epoch {}, seq {}".format(*self._serving)
