"""A whole device-ordered pipeline in one process, over ``fake_cuda``: no GPU, real everything else.

Rank 0 is on this thread, the policy rank on another; real rings, windows, counted link, control
socket, loops, ledger and log.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeDriver, queue_call
from fake_put import FakePuts
from fake_wait import FakeWaits
from host_windows import HostWindows
from linked_ends import linked
from pipeline_in_process import Collector, NewestValues, patient

from ppstream.config.schema import PipelineConfig
from ppstream.control.peer import Peer
from ppstream.core.clock import now_ns
from ppstream.core.errors import PeerLostError
from ppstream.core.simulated_delay import Delay
from ppstream.core.waiter import Waiter
from ppstream.cuda import driver
from ppstream.cuda.device_clock import DeviceClock
from ppstream.cuda.driver import CudaStream, DeviceProbe, DriverCall
from ppstream.ingest.intake import build_intake
from ppstream.ingest.sources import Source
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.links import device_counters
from ppstream.links.device_link import run_ahead
from ppstream.links.headers import link_shape
from ppstream.links.slots import LinkShape
from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord, TimestampLog
from ppstream.pipeline.credits import CreditLedger
from ppstream.pipeline.decode import CopyDecoder
from ppstream.pipeline.device import policy_rank as device_policy_rank
from ppstream.pipeline.device.executor import DeviceExecutor
from ppstream.pipeline.device.policy_rank import DevicePolicyRank, PolicyDevice
from ppstream.pipeline.device.rank0_queue import Rank0Device, Streams
from ppstream.pipeline.loop import Rank0Loop
from ppstream.pipeline.pacing import Pacing, Saturated
from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
from ppstream.pipeline.stage_c import StageC
from ppstream.policy.protocol import instruct
from ppstream.policy.unwritten import FilledPolicy, drawn_for
from ppstream.wire.rank_messages import Drain

RUN_ID = "r"
LOAD_LIMIT_S = 3.0
#: Settings of every such pipeline.
GPUS = (
    "placement.rank0=cuda:0",
    "placement.policy=cuda:1",
    "actions.lease_ms=60000",
)


class Work:
    """What stands in for a stage's work on a GPU: a stream that sleeps."""

    def __init__(self, seconds: float = 0.0, products: int = 1) -> None:
        self._seconds = seconds
        self.products = products
        self.mean_ns = round(seconds * 1e9)

    def calls(self, stream: CudaStream) -> tuple[DriverCall, ...]:
        def queue() -> tuple[int]:
            queue_call(stream, lambda: time.sleep(self._seconds))
            for _ in range(self.products - 1):
                queue_call(stream, nothing)
            return (0,)

        return (DriverCall(queue, "sleep"),) if self._seconds or self.products > 1 else ()


def nothing() -> None:
    """A kernel that is over at once."""


class QueuedPolicy:
    """What DeviceStageB is on a GPU: the policy runs when its stream comes to it."""

    def __init__(self, policy: NewestValues, kernels: int) -> None:
        self.policy = FilledPolicy(policy, drawn_for(RUN_ID))
        self.kernels = kernels
        self.stream: Any = None
        self.refuse: set[int] = set()  # calls that fail while they are queued
        self.loading: set[int] = set()  # calls that load a kernel
        self.load = nothing  # a kernel
        self.calls = 0

    def __call__(self, envelope: Any, result: Any) -> None:
        self.calls += 1
        if self.calls - 1 in self.loading:
            self.load()
        if self.calls - 1 in self.refuse:
            raise ValueError("no such kernel")
        for _ in range(self.kernels - 1):
            queue_call(self.stream, nothing)
        queue_call(self.stream, lambda: self.policy(envelope.tensors, result.tensors))

    def instruct(self, number: int, text: str) -> str:
        self.load()
        return instruct(self.policy, number, text)


class DevicePipeline:
    """``rank0`` is a loop over a DeviceExecutor with ``policy`` behind it; a context manager."""

    def __init__(
        self,
        config: PipelineConfig,
        policy: NewestValues,
        directory: Path,
        patch: pytest.MonkeyPatch,
        *,
        runs_ahead: bool = True,
        kernels: int = 1,
        a_kernels: int = 1,
        a_s: float = 0.0,
        c_s: float = 0.0,
        puts: bool = False,
        looks: bool = False,
    ) -> None:
        self._a_s, self._c_s, self._a_kernels = a_s, c_s, a_kernels
        self.driver = FakeDriver()
        patch.setattr(driver, "driver", lambda: self.driver)
        self.b: CudaStream  # of stage B
        for module in (device_counters, device_policy_rank):
            patch.setattr(module, "stream", self._stream)
        patch.setattr("torch.cuda.synchronize", lambda device=None: None)
        config = patient(config)
        self.config, self.policy = config, policy
        self.intake = build_intake(config)
        self.collector = Collector()
        self.failure: list[BaseException] = []
        self._directory = directory
        self._stack = ExitStack()
        self._stack.callback(self.driver.close)
        self._nodes = kernels if runs_ahead else None
        takes_texts = config.policy.instructions
        ahead = 0 if takes_texts else run_ahead(self._nodes, 0, config.pipeline.d_in)
        self.shape = shape = link_shape(config, self.intake.cutter.inputs, policy.outputs, 3, ahead)
        self._front_link, self._back_link = linked(
            shape, FakePuts if puts else None, FakeWaits if looks else None
        )
        ours, theirs = socket.socketpair()
        self.front, self.back = Peer(ours), Peer(theirs)
        self._stack.callback(self.front.close)
        self._stack.callback(self.back.close)
        self.rank0 = self._rank0(shape)
        self.queued = QueuedPolicy(policy, kernels)
        self.policy_rank = self._policy_rank(shape)
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> DevicePipeline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(PeerLostError):  # a test may have let it vanish
            self.front.send(Drain("test over"))
        self._thread.join(10)
        assert not self._thread.is_alive(), "the policy rank did not leave"
        assert self._back_link.close(), "a wait of the policy rank was not released"
        assert self._front_link.close()
        self._stack.close()
        assert not self.driver.failures, self.driver.failures

    def load(self) -> None:
        """As a kernel's first launch: waits for all that is queued on the policy rank's device."""
        streams = [self._back_link.receiving, self._back_link.sending, self.queued.stream]
        until = time.monotonic() + LOAD_LIMIT_S
        while any(stream.handle.pending for stream in streams):
            if time.monotonic() > until:
                raise TimeoutError(f"a load stood for {LOAD_LIMIT_S} s behind a queued wait")
            time.sleep(0.001)

    def saturate(self) -> None:
        source = SyntheticSource(self.config, self.intake.rows[0], seed=1, start_ns=now_ns())
        self.enter(source, Saturated(self.intake.rows))

    def enter(self, source: Source, pacing: Pacing, phase: str = "ready") -> None:
        self.rank0.enter(
            phase, intake=self.intake, source=source, pacing=pacing, emitter=self.collector
        )

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """One rank's log so far."""
        (self.rank0 if rank == 0 else self.policy_rank).log.flush()
        text = (self._directory / f"rank{rank}.gen0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def envelopes(self) -> list[Mapping[str, Any]]:
        return [line for line in self.lines(0) if line["kind"] == "envelope"]

    def _stream(self, role: str) -> CudaStream:
        made = CudaStream()
        if role == "b":
            self.b = made
        return made

    def _rank0(self, shape: LinkShape) -> Rank0Loop:
        config = self.config
        self.a, self.c = a, c = CudaStream(), CudaStream()
        link: Any = self._front_link
        windows = HostWindows(config, shape, len(link.out), a)
        own = Rank0Device(
            link=link,
            shape=shape,
            streams=Streams(a, c),
            clock=DeviceClock(DeviceProbe(CudaStream())),
            work_a=Work(self._a_s, self._a_kernels),  # type: ignore[arg-type]
            work_c=Work(self._c_s),  # type: ignore[arg-type]
        )
        ledger = CreditLedger(config.pipeline.d_in, config.pipeline.d_out)
        stage_c = StageC(config, CopyDecoder(), Delay(0.0))
        log = self._log(0, EnvelopeRecord)
        self.executor = DeviceExecutor(own, PolicyRankPeer(self.front, config))
        parts = (config, windows, stage_c, ledger, log, self._waiter())
        return Rank0Loop(*parts, executor=self.executor)

    def _policy_rank(self, shape: LinkShape) -> DevicePolicyRank:
        self.policy_waiter = self._waiter()
        parts = PolicyDevice(
            config=self.config,
            stage_b=self.queued,  # type: ignore[arg-type]
            link=self._back_link,  # type: ignore[arg-type]
            peer=self.back,
            log=self._log(1, PolicyRecord),
            waiter=self.policy_waiter,
            clock=DeviceClock(DeviceProbe(CudaStream())),
            stream=None,  # type: ignore[arg-type]
            shape=shape,
            nodes=self._nodes,
        )
        loop = DevicePolicyRank(parts)
        self.queued.stream, self.queued.load = self.b, self.load
        return loop

    def _log(self, rank: int, record: Any) -> TimestampLog:
        path = self._directory / f"rank{rank}.gen0.jsonl"
        log = TimestampLog(path, record, 4096, run_id=RUN_ID, generation=0)
        self._stack.callback(log.close)
        return log

    def _waiter(self) -> Waiter:
        waiter = Waiter()
        self._stack.callback(waiter.close)
        return waiter

    def _serve(self) -> None:
        try:
            self.policy_rank.run(lambda: False)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.failure.append(error)
            traceback.print_exception(error)
            self.back.close()  # as a process that ends does
