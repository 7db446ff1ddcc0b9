"""A whole pipeline in one process: rank 0 on this thread, the policy rank on another.

Real rings, windows, host link, control socket, loops and log; only the processes are missing.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ppstream.config import load
from ppstream.config.schema import PipelineConfig
from ppstream.control.peer import Peer
from ppstream.core.clock import now_ns
from ppstream.core.errors import PeerLostError
from ppstream.core.simulated_delay import Delay
from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.ingest.intake import build_intake
from ppstream.ingest.sources import Source
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.links.headers import ENVELOPE_HEADER, link_shape
from ppstream.links.host import open_host
from ppstream.links.protocol import Neighbours
from ppstream.links.slots import BACK, FRONT, SlotLayout, new_slots
from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord, TimestampLog
from ppstream.pipeline.credits import CreditLedger
from ppstream.pipeline.decode import CopyDecoder
from ppstream.pipeline.host_executor import HostExecutor
from ppstream.pipeline.host_policy_rank import HostPolicyRank
from ppstream.pipeline.inline_executor import InlineExecutor
from ppstream.pipeline.loop import Rank0Loop
from ppstream.pipeline.pacing import Pacing, Saturated
from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
from ppstream.pipeline.split_executor import SplitExecutor
from ppstream.pipeline.stage_a import FrontParts, StageA
from ppstream.pipeline.stage_b import StageB
from ppstream.pipeline.stage_c import StageC
from ppstream.policy.batch_sizes import batch_sizes
from ppstream.policy.parts import part_times_of
from ppstream.policy.protocol import Decoder, Policy
from ppstream.wire.rank_messages import Drain
from ppstream.wire.robot_messages import ActionChunk

SMALL = Path(__file__).with_name("small.toml")


class NewestValues:
    """A policy that returns the newest input values and can be told to misbehave.

    ``act`` is called with the number of the call before anything is written.
    """

    def __init__(self, act: Callable[[int], None] = lambda call: None) -> None:
        self.inputs = (TensorSpec("state.values", (8, 5)),)
        self.outputs = (TensorSpec("actions", (4, 2)),)
        self.act = act
        self.calls = 0
        self.resets: list[list[bool]] = []

    def reset(self, rows: torch.Tensor) -> None:
        self.resets.append(rows.tolist())

    def __call__(self, window: Any, out: Any) -> None:
        self.calls += 1
        self.act(self.calls - 1)
        out["actions"].copy_(window["state.values"][:, -4:, :2])


class Collector:
    """An emitter that keeps what it is given."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int, int, np.ndarray]] = []

    def emit(self, row: int, chunk: ActionChunk) -> None:
        values = np.frombuffer(chunk.actions, np.float32).copy()
        self.chunks.append((chunk.epoch, chunk.seq, chunk.window_end_ns, values))


def small_config(*overrides: str, **parts: Any) -> PipelineConfig:
    """tests/support/small.toml without simulated time; on a busy machine no chunk expires."""
    usual = ("simulate.a_ms=0", "simulate.c_ms=0", "actions.lease_ms=60000")
    config = load.read(str(SMALL), (*usual, *overrides))
    return msgspec.structs.replace(config, **parts)


def patient(config: PipelineConfig) -> PipelineConfig:
    """For ranks of one process: no heart beats there, and a thread may be off its core for long."""
    liveness = msgspec.structs.replace(config.liveness, frozen_ms=100_000, watchdog_s=200)
    return msgspec.structs.replace(config, liveness=liveness)


class PipelineInProcess:
    """``rank0`` is a loop (or its twin) with ``policy`` behind it; a context manager.

    ``front`` is at the end of its stage A.
    """

    def __init__(
        self,
        config: PipelineConfig,
        policy: Policy,
        directory: Path,
        *,
        inline: bool = False,
        decoder: Decoder | None = None,
        front: Policy | None = None,
    ) -> None:
        config = self.config = patient(config)
        self.policy: Any = policy
        self.intake = build_intake(config)
        self.collector = Collector()
        self._stack = ExitStack()
        self._failure: list[BaseException] = []
        self._log_path = directory / "rank0.gen0.jsonl"
        parts = self._parts(decoder or CopyDecoder())
        leaving = self.intake.cutter.inputs if front is None else front.outputs
        shape = link_shape(config, leaving, policy.outputs, 0)
        sizes = batch_sizes(config, policy)
        stage_b = StageB(policy, config.batch.rows, sizes=sizes)
        self._thread: threading.Thread | None = None
        if inline:
            envelope, result = new_slots(shape.envelope, 1)[0], new_slots(shape.result, 1)[0]
            twin = InlineExecutor(stage_b, envelope=envelope, result=result)
            self.rank0: Any = Rank0Loop(*parts, executor=twin)
            return
        ours, theirs = socket.socketpair()
        ours_peer, back = Peer(ours), Peer(theirs, expects_fds=True)
        ends = (
            open_host(Neighbours.pair(FRONT, ours_peer), shape, 5.0),
            open_host(Neighbours.pair(BACK, back), shape, 5.0),
        )
        on_host = SplitExecutor if config.threads == "split" else HostExecutor
        hops, self.roused = ends[0], 0

        def rouse() -> None:
            self.roused += 1
            assert hops.rouse is not None
            hops.rouse()

        self.executor = on_host(hops._replace(rouse=rouse), (PolicyRankPeer(ours_peer, config),))
        self.rank0 = Rank0Loop(*parts, executor=self.executor)
        if front is not None:
            self.rank0.stage_a.front = self._front_parts(front)
        self.front = ours_peer
        self.back_socket = theirs
        log = TimestampLog(
            directory / "rank1.gen0.jsonl", PolicyRecord, 1024, run_id="r", generation=0
        )
        waiter = Waiter()
        self.policy_log = log
        loop = HostPolicyRank(config, stage_b, ends[1], back, log, waiter)
        self.policy_loop = loop
        self._thread = threading.Thread(target=self._serve, args=(loop,))
        self._thread.start()
        closing = (ours_peer, back, log, waiter, *ends)
        for close in (part.close for part in closing):
            self._stack.callback(close)

    def __enter__(self) -> PipelineInProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            with suppress(PeerLostError):  # a test may have let it vanish
                self.front.send(Drain("test over"))
            self._thread.join(10)
            assert not self._thread.is_alive(), "the policy rank did not leave"
        self._stack.close()
        for row in self.intake.rows:
            for ring in row.rings.values():
                ring.check()

    def saturate(self) -> None:
        """Enter a phase with synthetic samples, as fast as the pipeline goes."""
        source = SyntheticSource(self.config, self.intake.rows[0], seed=1, start_ns=now_ns())
        self.enter(source, Saturated(self.intake.rows))

    def enter(self, source: Source, pacing: Pacing) -> None:
        self.rank0.enter(
            "ready", intake=self.intake, source=source, pacing=pacing, emitter=self.collector
        )

    def lines(self) -> list[dict[str, Any]]:
        """Rank 0's log so far."""
        self.rank0.log.flush()
        return [json.loads(line) for line in self._log_path.read_text().splitlines()]

    def envelopes(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] == "envelope"]

    def _front_parts(self, front: Policy) -> FrontParts:
        rows = self.config.batch.rows
        (window,) = new_slots(SlotLayout(ENVELOPE_HEADER, self.intake.cutter.inputs, rows), 1)
        stage = StageB(front, rows, sizes=batch_sizes(self.config, front))
        parts = FrontParts(stage, window, part_times_of(front))
        parts.on_fault = self.rank0.report_policy_fault
        return parts

    def _parts(self, decoder: Decoder) -> tuple[Any, ...]:
        config = self.config
        log = TimestampLog(self._log_path, EnvelopeRecord, 1024, run_id="r", generation=0)
        waiter = Waiter()
        self._stack.callback(log.close)
        self._stack.callback(waiter.close)
        simulate = config.simulate
        return (
            config,
            StageA(config, Delay(simulate.a_ms)),
            StageC(config, decoder, Delay(simulate.c_ms)),
            CreditLedger(config.pipeline.d_in, config.pipeline.d_out),
            log,
            waiter,
        )

    def _serve(self, loop: HostPolicyRank) -> None:
        try:
            loop.run(lambda: False)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self._failure.append(error)
