"""Policies of thousands of kernels on two GPUs: no launch of either rank may wait for the other.

Runs of one test go beside each other, but for those of short stages: they share the GPUs, and no
time is measured.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks

from ppstream.core.clock import now_ns
from ppstream.robot.client import RobotClient

CONFIG = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "bench_gpus.toml"
SETTINGS = (
    "policy.target=many_kernels:build",
    "simulate.a_ms=0",
    "simulate.c_ms=0",
    "bringup.standalone=5",
    "bringup.warmup_max=60",
    'bringup.accept=["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"]',
    "actions.lease_ms=2000",
    "liveness.watchdog_s=20",
)
READY_LIMIT_S = 150
ENVELOPES = 240  # of bring-up; of short stages more go by until the period is steady
ENVELOPES_OF_SHORT = 1200
SHORT = 100  # kernels
IDLE_S = 10.0
ANSWER_LIMIT_S = 20.0
ANSWERS = 5
END_LIMIT_S = 12
DRAINED, PEER_LOST = 0, 20
KILLED = -9

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]


def at_once(jobs: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


class Robot:
    """Pushes a sample when it is told to, and counts the chunks that come."""

    def __init__(self, endpoint: str) -> None:
        self.chunks = 0
        streams = [("joints", 14), ("vision", 256)]
        self.client = RobotClient(
            endpoint,
            robot="idle",
            streams=streams,
            actions=[f"j{n}" for n in range(1, 8)],
            on_chunk=self._count,
        )

    def _count(self, chunk: object) -> None:
        self.chunks += 1

    def is_answered(self) -> bool:
        """Sends samples until a chunk comes of one of them."""
        before, until = self.chunks, time.monotonic() + ANSWER_LIMIT_S
        while self.chunks == before and time.monotonic() < until:
            self.client.push("vision", now_ns(), np.zeros(256, np.float32))
            self.client.push("joints", now_ns(), np.zeros(14, np.float32))
            time.sleep(0.1)
        return self.chunks > before


@contextmanager
def served(folder: Path, kernels: int, *settings: str) -> Iterator[tuple[Ranks, Robot]]:
    """A run that is ready, and a robot that it serves."""
    folder.mkdir(0o700)
    envelopes = ENVELOPES_OF_SHORT if kernels <= SHORT else ENVELOPES
    endpoint = f"unix://{folder}/r"
    service = ("pipeline.pacing=sample", f"service.endpoint={endpoint}", "service.duration_s=600")
    asked = (*SETTINGS, f"bringup.envelopes={envelopes}", *settings, *service)
    with Ranks(folder, *asked, config=CONFIG) as ranks:
        ranks.wait_for_event("phase", READY_LIMIT_S, phase="ready")
        robot = Robot(endpoint)
        with robot.client as client:
            client.connect(ANSWER_LIMIT_S)
            assert client.wait_ready(ANSWER_LIMIT_S), ranks.output()
            yield ranks, robot


def cut(ranks: Ranks, robot: Robot) -> None:
    ranks.processes[0].send_signal(signal.SIGUSR1)


def reset(ranks: Ranks, robot: Robot) -> None:
    robot.client.reset()


def instruct(ranks: Ranks, robot: Robot) -> None:
    robot.client.instruct("pour the tea")


def nothing(ranks: Ranks, robot: Robot) -> None:
    """Only time passes."""


def stop(ranks: Ranks) -> list[int]:
    for process in ranks.processes:  # as torchrun signals: all at once
        process.send_signal(signal.SIGTERM)
    return [DRAINED, DRAINED]


def kill(rank: int) -> Callable[[Ranks], list[int]]:
    def ended(ranks: Ranks) -> list[int]:
        ranks.processes[rank].kill()
        return [KILLED, PEER_LOST] if rank == 0 else [PEER_LOST, KILLED]

    return ended


def freeze(rank: int) -> Callable[[Ranks], list[int]]:
    def ended(ranks: Ranks) -> list[int]:
        ranks.processes[rank].send_signal(signal.SIGSTOP)
        return [KILLED, PEER_LOST] if rank == 0 else [PEER_LOST, KILLED]

    return ended


#: What happens after each pause: something the run goes on from, then its end.
IDLE_ENDS = [
    (cut, stop),
    (reset, kill(0)),
    (instruct, kill(1)),
    (nothing, freeze(0)),
    (cut, freeze(1)),
]
FORMS = {
    "peer-1": ("pipeline.d_in=1",),
    "peer-2": ("pipeline.d_in=2",),
    "peer-3": ("pipeline.d_in=3",),
    "nccl": ("link.kind=nccl",),
    "pinned": ("link.kind=pinned",),
    "no-graph": ("policy.graph=false",),
    "stage-a": ("simulate.a_ms=15", "decode.target=many_kernels:build_decoder"),
}


@pytest.mark.parametrize("kernels", [100, 1000, 5000, 20_000])
def test_a_policy_of_many_kernels_earns_ready_and_serves(tmp_path: Path, kernels: int) -> None:
    def run(depth: int) -> None:
        settings = (f"policy.options={{kernels={kernels}}}", f"pipeline.d_in={depth}")
        with served(tmp_path / str(depth), kernels, *settings) as (ranks, robot):
            for _ in range(ANSWERS):
                assert robot.is_answered(), ranks.output()
            expected = stop(ranks)
            assert ranks.wait(END_LIMIT_S) == expected, ranks.output()
            (ahead,) = [line for line in ranks.lines(1) if line.get("name") == "run_ahead"]
            print(f"d_in {depth}: {ahead['nodes']} nodes, {ahead['envelopes']} ahead")

    if kernels <= SHORT:  # stages so short are never steady beside another run's
        for depth in (1, 2, 3):
            run(depth)
    else:
        at_once([lambda depth=depth: run(depth) for depth in (1, 2, 3)])


@pytest.mark.parametrize("form", FORMS)
def test_an_idle_run_of_many_kernels_hears_all_it_is_told(tmp_path: Path, form: str) -> None:
    kernels = 1 if form == "stage-a" else 5000

    def run(number: int) -> None:
        act, end = IDLE_ENDS[number]
        settings = (
            f"policy.options={{kernels={kernels}, instructions=true}}",
            "policy.instructions=true",
        )
        with served(tmp_path / str(number), kernels, *FORMS[form], *settings) as (ranks, robot):
            assert robot.is_answered(), ranks.output()
            time.sleep(IDLE_S)
            act(ranks, robot)
            assert robot.is_answered(), f"{act.__name__}: {ranks.output()}"
            time.sleep(IDLE_S)
            expected = end(ranks)
            assert ranks.wait(END_LIMIT_S) == expected, ranks.output()

    at_once([lambda number=number: run(number) for number in range(len(IDLE_ENDS))])
