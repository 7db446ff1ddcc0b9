"""A whole device-ordered pipeline in one process, over ``fake_cuda``: no GPU, real everything else.

Rank 0 is on this thread, each policy rank on one of its own; real rings, windows, counted links,
control sockets, loops, ledger and logs.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeDriver, FakePart, queue_call
from fake_put import FakePuts, FakeStamped
from fake_wait import FakeWaits
from host_windows import HostWindows
from linked_ends import ends, linked
from pipeline_in_process import Collector, patient

from ppstream.analysis.audits import DEVICE_SLACK_NS
from ppstream.config.schema import PipelineConfig
from ppstream.control.peer import Peer
from ppstream.core.clock import now_ns
from ppstream.core.errors import PeerLostError
from ppstream.core.simulated_delay import Delay
from ppstream.core.waiter import Waiter
from ppstream.cuda import driver
from ppstream.cuda.device_clock import DeviceClock
from ppstream.cuda.device_stamps import StampProbe
from ppstream.cuda.driver import CudaStream, DeviceProbe, DriverCall
from ppstream.ingest.intake import build_intake
from ppstream.ingest.sources import Source
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.launch.device_ranks import PreparedPolicy, sizes_at_front, sizes_on_gpu
from ppstream.links import device_counters
from ppstream.links.device_counters import CountedLink
from ppstream.links.device_link import DeviceLink, Headers, device_slots, most_queued, run_ahead
from ppstream.links.device_replicas import DeviceReplicas
from ppstream.links.headers import ENVELOPE_HEADER, link_shape
from ppstream.links.slots import BACK, LinkShape, Position, SlotLayout
from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord, TimestampLog
from ppstream.pipeline.credits import CreditLedger
from ppstream.pipeline.decode import CopyDecoder
from ppstream.pipeline.device import policy_rank as device_policy_rank
from ppstream.pipeline.device.executor import DeviceExecutor
from ppstream.pipeline.device.policy_rank import DevicePolicyRank, PolicyDevice
from ppstream.pipeline.device.rank0_queue import Rank0Device, Streams
from ppstream.pipeline.device.stage_a import DeviceFrontParts
from ppstream.pipeline.device.stage_b import StageGraphs
from ppstream.pipeline.device.stamped_hop import StampedHop
from ppstream.pipeline.loop import Rank0Loop
from ppstream.pipeline.pacing import Pacing, Saturated
from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
from ppstream.pipeline.replica_losses import ReplicaLosses
from ppstream.pipeline.stage_c import StageC
from ppstream.policy.protocol import Policy, instruct
from ppstream.policy.unwritten import FilledPolicy, drawn_for
from ppstream.wire.rank_messages import Drain

RUN_ID = "r"
LOAD_LIMIT_S = 3.0
#: Settings of every such pipeline.
GPUS = (
    "placement.rank0=cuda:0",
    "placement.policy=cuda:1",
)


class Work:
    """What stands in for a stage's work on a GPU: a stream that sleeps."""

    def __init__(self, seconds: float = 0.0, products: int = 1) -> None:
        self._seconds = seconds
        self.products = products
        self.mean_ns = round(seconds * 1e9)

    def calls(self, stream: CudaStream) -> tuple[DriverCall, ...]:
        def queue() -> tuple[int]:
            queue_call(stream, lambda: time.sleep(self._seconds), nodes=1)
            if self.products > 1:
                queue_call(stream, nothing, nodes=self.products - 1)
            return (0,)

        return (DriverCall(queue, "sleep"),) if self._seconds or self.products > 1 else ()

    def parts(self) -> tuple[FakePart, ...]:
        return (FakePart(lambda: time.sleep(self._seconds), self.products - 1),)


class FakeAnswers:
    """The clock that the stand-in driver's streams go by."""

    def ask(self, stream: Any) -> None:
        """At once."""

    def answer(self, stream: Any) -> int:
        return time.monotonic_ns()


def nothing() -> None:
    """Kernels that are over at once."""


class QueuedPolicy:
    """What DeviceStageB is on a GPU: the policy runs when its stream comes to it."""

    def __init__(self, policy: Policy, kernels: int) -> None:
        self.policy = FilledPolicy(policy, drawn_for(RUN_ID))
        self.kernels = kernels
        self.stream: Any = None
        self.is_graphed = False
        self.resets: int | None = None  # calls; None: it keeps no memory
        self.refuse: set[int] = set()  # calls that fail while they are queued
        self.loading: set[int] = set()  # calls that load a kernel
        self.load = nothing  # a kernel
        self.calls = 0

    def __call__(self, envelope: Any, result: Any, rows: int | None = None) -> None:
        self.calls += 1
        if self.calls - 1 in self.loading:
            self.load()
        if self.calls - 1 in self.refuse:
            raise ValueError("no such kernel")
        if self.kernels > 1:
            queue_call(self.stream, nothing, nodes=self.kernels - 1)
        policy = partial(self.policy, envelope.tensors, result.tensors, rows)
        queue_call(self.stream, policy, nodes=1)

    def graphs(self, envelope: Any, result: Any) -> StageGraphs | None:
        if not self.is_graphed:
            return None
        policy = partial(self.policy, envelope.tensors, result.tensors)
        part = FakePart(policy, self.kernels - 1)
        return StageGraphs(FakePart(nothing) if self.resets is not None else None, (part,))

    def reset(self) -> None:
        if self.resets is not None:
            self.resets += 1
            if self.resets - 1 in self.refuse:
                raise ValueError("no such row")

    def instruct(self, number: int, text: str) -> str:
        self.load()
        return instruct(self.policy, number, text)


class PolicyRankThread:
    """A policy rank on a thread of this process.

    Attributes:
        front, back: rank 0's and its own end of their control socket.
        loop: its own.
        queued: its stage B.
        b: stage B's stream.
        waiter: its own.
        failure: what ended its thread.
    """

    b: CudaStream

    def __init__(
        self,
        link: CountedLink,
        policy: Policy,
        kernels: int,
        parts: dict[str, Any],
        stack: ExitStack,
        *,
        graphs: bool,
        remembers: bool,
    ) -> None:
        self.link = link
        ours, theirs = socket.socketpair()
        self.front, self.back = Peer(ours), Peer(theirs)
        stack.callback(self.front.close)
        stack.callback(self.back.close)
        self.queued = QueuedPolicy(policy, kernels)
        self.waiter = parts["waiter"]
        self.failure: list[BaseException] = []
        own: Any = {"link": link} | parts | {"stage_b": self.queued, "peer": self.back}
        self.loop = DevicePolicyRank(PolicyDevice(**own))
        self.queued.is_graphed, self.queued.resets = graphs, 0 if remembers else None
        self.loop.make_graphs()
        self._thread = threading.Thread(target=self._serve)

    def begin(self, b: CudaStream) -> None:
        self.b = self.queued.stream = b
        self.queued.load = self.load
        self._thread.start()

    def end(self) -> None:
        with suppress(PeerLostError):  # a test may have let it vanish
            self.front.send(Drain("test over"))
        self._thread.join(10)
        assert not self._thread.is_alive(), "a policy rank did not leave"
        assert self.link.close(), "a wait of a policy rank was not released"

    def load(self) -> None:
        """As a kernel's first launch: waits for all that is queued on the policy rank's device."""
        streams = [self.link.receiving, self.link.sending, self.b]
        until = time.monotonic() + LOAD_LIMIT_S
        while any(stream.handle.pending for stream in streams):  # type: ignore[attr-defined]
            if time.monotonic() > until:
                raise TimeoutError(f"a load stood for {LOAD_LIMIT_S} s behind a queued wait")
            time.sleep(0.001)

    def _serve(self) -> None:
        try:
            self.loop.run(lambda: False)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.failure.append(error)
            traceback.print_exception(error)
            self.back.close()  # as a process that ends does


class DevicePipeline:
    """``rank0`` is a loop over a DeviceExecutor; a context manager.

    Behind it ``policy`` on a policy rank, or several in a chain, or as replicas where the
    configuration says so; ``front`` is at the end of its stage A.
    """

    def __init__(
        self,
        config: PipelineConfig,
        policy: Policy | Sequence[Policy],
        directory: Path,
        patch: pytest.MonkeyPatch,
        *,
        runs_ahead: bool = True,
        kernels: int = 1,
        a_kernels: int = 1,
        a_s: float = 0.0,
        c_s: float = 0.0,
        puts: bool = False,
        spins: bool = False,
        stamps: bool = False,
        graphs: bool = False,
        remembers: bool = False,
        front: Policy | None = None,
        front_ns: int = 0,
    ) -> None:
        self._front, self._front_ns = front, front_ns
        self._a_s, self._c_s, self._a_kernels = a_s, c_s, a_kernels
        self.driver = FakeDriver()
        patch.setattr(driver, "driver", lambda: self.driver)
        self._made: list[CudaStream] = []  # of stages B
        for module in (device_counters, device_policy_rank):
            patch.setattr(module, "stream", self._stream)
        patch.setattr("torch.cuda.synchronize", lambda device=None: None)
        config = patient(config)
        self.config = config
        self.policies = policies = [policy] if hasattr(policy, "inputs") else [*policy]  # type: ignore[list-item, misc]
        self.policy: Any = policies[0]
        self.intake = build_intake(config)
        self.collector = Collector()
        self._directory = directory
        self._stack = ExitStack()
        self._stack.callback(self.driver.close)
        self._is_in_turn = config.placement.replicas > 1
        self.let_go: list[int] = []  # replicas that the run goes on without
        self.on_let_go: list[Callable[[int], None]] = []
        self.on_exit: list[Callable[[], None]] = []  # before anybody is asked to leave
        self._nodes = kernels if runs_ahead else None
        takes_texts = config.policy.instructions
        ahead = 0 if takes_texts else run_ahead(self._nodes, 0, config.pipeline.d_in)
        window = self.intake.cutter.inputs
        hops = [window if front is None else front.outputs, *(each.outputs for each in policies)]
        around = [(hops[0], hops[-1]), *pairwise(hops)]  # of each rank
        if self._is_in_turn:
            around = [(hops[0], hops[-1])] * (1 + len(policies))
        last = 1 if self._is_in_turn else len(policies)
        shapes = [
            link_shape(config, *both, 3, ahead, min(k, last)) for k, both in enumerate(around)
        ]
        self.shape = shapes[0]
        self._stamps, self._graphs = stamps or graphs, graphs
        self._remembers = remembers
        stamps = self._stamps
        makes: dict[str, Any] = {
            "make_puts": FakePuts if puts else None,
            "make_waits": FakeWaits if spins or stamps else None,
            "make_stamped": FakeStamped if stamps else None,
        }
        self._front_link: DeviceLink
        if self._is_in_turn:
            self._front_link, *links = self._replicas(shapes, makes)
        else:
            self._front_link, *links = linked(*shapes, **makes)
        self.ranks = [
            self._policy_rank(k, link, shapes[k], each, kernels)
            for k, (link, each) in enumerate(zip(links, policies, strict=True), 1)
        ]
        self.rank0 = self._rank0(shapes[0], self._front_link)

    @property
    def policy_rank(self) -> DevicePolicyRank:
        """Of the first policy rank, as all of these."""
        return self.ranks[0].loop

    @property
    def queued(self) -> QueuedPolicy:
        return self.ranks[0].queued

    @property
    def b(self) -> CudaStream:
        return self.ranks[0].b

    @property
    def policy_waiter(self) -> Waiter:
        return self.ranks[0].waiter

    @property
    def front(self) -> Peer:
        return self.ranks[0].front

    @property
    def back(self) -> Peer:
        return self.ranks[0].back

    @property
    def failure(self) -> list[BaseException]:
        return [error for rank in self.ranks for error in rank.failure]

    def __enter__(self) -> DevicePipeline:
        for rank, b in zip(self.ranks, self._made, strict=True):
            rank.begin(b)
        return self

    def __exit__(self, *_: object) -> None:
        for call in self.on_exit:
            call()
        for rank in self.ranks:
            rank.end()
        assert self._front_link.close()
        self._stack.close()
        assert not self.driver.failures, self.driver.failures

    def saturate(self) -> None:
        source = SyntheticSource(self.config, self.intake.rows[0], seed=1, start_ns=now_ns())
        self.enter(source, Saturated(self.intake.rows))

    def enter(self, source: Source, pacing: Pacing, phase: str = "ready") -> None:
        self.rank0.enter(
            phase, intake=self.intake, source=source, pacing=pacing, emitter=self.collector
        )

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """One rank's log so far."""
        (self.rank0 if rank == 0 else self.ranks[rank - 1].loop).log.flush()
        text = (self._directory / f"rank{rank}.gen0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def envelopes(self) -> list[Mapping[str, Any]]:
        return [line for line in self.lines(0) if line["kind"] == "envelope"]

    def _replicas(self, shapes: Sequence[LinkShape], makes: dict[str, Any]) -> list[Any]:
        """Rank 0's links as one, on the same streams, and the other end of each."""
        pairs = [ends(shape, **makes) for shape in shapes[1:]]
        shared: dict[str, CudaStream] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                device_counters, "stream", lambda role: shared.setdefault(role, CudaStream())
            )
            fronts = [end(0) for end in pairs]
        return [DeviceReplicas(fronts), *(end(1) for end in pairs)]

    def _stream(self, role: str) -> CudaStream:
        if role != "b":
            return CudaStream()
        self._made.append(self._b)
        return self._b

    def _rank0(self, shape: LinkShape, link: Any) -> Rank0Loop:
        config = self.config
        self.a, self.c = a, c = CudaStream(), CudaStream()
        layout = SlotLayout(ENVELOPE_HEADER, self.intake.cutter.inputs, config.batch.rows)
        windows = HostWindows(
            config, layout, len(link.out), a, self._front_parts(layout), graphs=self._graphs
        )
        own = Rank0Device(
            link=link,
            shape=shape,
            streams=Streams(a, c),
            clock=self._clock(link),
            stamps=link if self._stamps and not self._is_in_turn else None,
            work_a=Work(self._a_s, self._a_kernels),  # type: ignore[arg-type]
            work_c=Work(self._c_s),  # type: ignore[arg-type]
        )
        ledger = CreditLedger(config.pipeline.d_in, config.pipeline.d_out)
        stage_c = StageC(config, CopyDecoder(), Delay(0.0))
        log = self._log(0, EnvelopeRecord)
        peers = tuple(PolicyRankPeer(rank.front, config, k) for k, rank in enumerate(self.ranks, 1))
        losses = None
        if isinstance(link, DeviceReplicas):
            losses = ReplicaLosses(
                config.placement.fewest, link, tuple((peer,) for peer in peers), self._let_go
            )
            for replica, peer in enumerate(peers):
                peer.name_of = partial(link.name_of, replica)
                peer.bears_loss = losses.bears_the_silent
        self.executor = DeviceExecutor(own, peers, losses)
        parts = (config, windows, stage_c, ledger, log, self._waiter())
        loop = Rank0Loop(*parts, executor=self.executor)
        if windows.front is not None:
            windows.front.on_fault = loop.report_policy_fault
        return loop

    def _let_go(self, rank: int) -> str:
        self.let_go.append(rank)
        for call in self.on_let_go:
            call(rank)
        return ""

    def _front_parts(self, layout: SlotLayout) -> DeviceFrontParts | None:
        if self._front is None:
            return None
        self.front_stage: Any = QueuedPolicy(self._front, 1)
        self.front_stage.stream = self.a
        memory = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
        headers = Headers(layout, 2 * most_queued(self.shape), 3)
        (window,) = device_slots(memory, layout, 1)
        took = self._front_ns, {"first": 7}
        prepared = PreparedPolicy(self._front, is_stateless=True, nodes=1, duration_ns=took[0])
        sizes = sizes_at_front(self.config, prepared, self.shape)
        return DeviceFrontParts(self.front_stage, window, headers, 1, *took, self.a, sizes)

    def _policy_rank(
        self, rank: int, link: CountedLink, shape: LinkShape, policy: Policy, kernels: int
    ) -> PolicyRankThread:
        self._b = CudaStream()
        parts = {
            "config": self.config,
            "link": link if link.stamped is None else StampedHop(link, self._b),
            "log": self._log(rank, PolicyRecord),
            "waiter": self._waiter(),
            "clock": self._clock(link),
            "stream": None,
            "shape": shape,
            "nodes": self._nodes,
            "position": BACK if self._is_in_turn else Position(rank, len(self.policies)),
            "rank": rank,
            "sizes": sizes_on_gpu(self.config, policy, shape),
        }
        made = {"graphs": self._graphs, "remembers": self._remembers}
        return PolicyRankThread(link, policy, kernels, parts, self._stack, **made)

    def _clock(self, link: CountedLink | DeviceReplicas) -> DeviceClock[Any]:
        if isinstance(link, CountedLink) and link.stamped is not None:
            return DeviceClock(StampProbe(FakeAnswers(), CudaStream()))
        return DeviceClock(DeviceProbe(CudaStream()))

    def _log(self, rank: int, record: Any) -> TimestampLog:
        path = self._directory / f"rank{rank}.gen0.jsonl"
        log = TimestampLog(path, record, 1024, run_id=RUN_ID, generation=0)
        self._stack.callback(log.close)
        return log

    def _waiter(self) -> Waiter:
        waiter = Waiter()
        self._stack.callback(waiter.close)
        return waiter


def assert_in_bounds(pipeline: DevicePipeline, depth: int, credit: str) -> None:
    """No envelope goes beyond D_in and D_out of ``depth``, and none begins without its credit."""
    envelopes = pipeline.envelopes()
    assert all(line["outstanding_max"] <= depth for line in envelopes)
    assert all(line["q_decode_max"] <= depth for line in envelopes)
    for giver, taker in zip(envelopes, envelopes[depth:], strict=False):
        assert taker["tSend"] >= giver["tRecv"]  # no credit, no send
    if credit == "before_window":
        assert_no_window_before_its_credit(pipeline, depth)


def assert_no_window_before_its_credit(pipeline: DevicePipeline, depth: int) -> None:
    """By the stamps of the policy ranks, which send what gives it."""
    sent_ns = {}
    for rank, policy_rank in enumerate(pipeline.executor.policy_ranks, 1):
        policy_rank.newest_b(0)  # its log is complete
        lines = pipeline.lines(rank)
        sent_ns |= {line["seq"]: line["tB1"] for line in lines if line["kind"] == "stage1"}
    begun_ns = {line["seq"]: line["tA0"] for line in pipeline.envelopes()}
    given = [seq for seq in begun_ns if seq - depth in sent_ns]
    assert len(given) == len(begun_ns) - depth
    for seq in given:
        assert begun_ns[seq] >= sent_ns[seq - depth] - DEVICE_SLACK_NS
