"""A robot with three cameras at 30 Hz, served from GPUs: every frame arrives, and is used."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.policy_cut import CameraRobot
from ranks import Ranks

from ppstream.config import load
from ppstream.core.clock import NS_PER_MS

GPUS = torch.cuda.device_count()
if GPUS < 1:
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

#: Configurations, and how many envelopes come a second: a sample each, or one each 13 ms.
SHIPPED = {"three_cameras": 500, "vla_2": 70}
ALONE = ("placement.rank0=cuda:0", "placement.policy=cuda:0")
ALONE_PER_S = 100  # of one rank at the least: it takes some 3 ms for all stages
CAMERAS = ("left", "right", "wrist")
SERVED_S = 4.0
#: Of an action at the robot, usually: some periods, and two hops.
AGE_MAX_MS = {"three_cameras": 50.0, "vla_1": 120.0, "vla_2": 120.0}
READY_LIMIT_S = 150
VISITS, VISIT_S = 8, 0.5
FRAME_AGE_MAX_MS = 45.0  # of the newest frame at the window's end: one period of 33 ms, and its way


def ready_lines(ranks: Ranks) -> Iterator[dict[str, Any]]:
    return (line for line in ranks.envelopes("ready") if line.get("drop") is None)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shipped", SHIPPED)
def test_three_cameras_of_a_real_robot_arrive_whole_at_30_hz(tmp_path: Path, shipped: str) -> None:
    serve_cameras(tmp_path, shipped, (), world_size=2, per_s=0.8 * SHIPPED[shipped])


def test_one_rank_cuts_their_windows_on_its_gpu(tmp_path: Path) -> None:
    said = serve_cameras(tmp_path, "three_cameras", ALONE, world_size=1, per_s=ALONE_PER_S)
    assert "windows are cut on cuda:0, where the policy reads them" in said


def test_frames_are_taken_in_while_one_rank_waits_for_its_gpu(tmp_path: Path) -> None:
    """The policy takes most of a frame's period: one that waited for it would be too old."""
    serve_cameras(tmp_path, "vla_1", (), world_size=1, per_s=20)


def test_robots_that_come_and_go_hold_nobody_up_and_leave_no_locked_memory(tmp_path: Path) -> None:
    """The GPU reads each one's frames where they lie; behind its end they are unlocked."""
    endpoint = f"unix://{tmp_path}/r"
    settings = (f"service.endpoint={endpoint}", "service.duration_s=60", "batch.rows=2", *ALONE)
    config = load.locate("three_cameras")
    with Ranks(tmp_path, *settings, world_size=1, config=config) as ranks:
        stays = CameraRobot(endpoint, "three_cameras", "stays")
        with stays.client as client:
            client.connect(READY_LIMIT_S)
            assert client.wait_ready(READY_LIMIT_S), ranks.output()
            with ThreadPoolExecutor(1) as thread:
                served = thread.submit(stays.run, VISITS * (VISIT_S + 1))
                for number in range(VISITS):
                    visitor = CameraRobot(endpoint, "three_cameras", f"visitor {number}")
                    before = len(stays.ages_ms)
                    with visitor.client as other:
                        other.connect(READY_LIMIT_S)
                        assert other.wait_ready(READY_LIMIT_S), ranks.output()
                        visitor.run(VISIT_S)
                        assert visitor.ages_ms
                        assert len(stays.ages_ms) > before
                    assert 1 <= locked_memories(ranks.processes[0].pid) <= 3  # one may just leave
                served.result()
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        assert ranks.wait() == [0], ranks.output()


def locked_memories(pid: int) -> int:
    """Robots' memories that a process has mapped: it does so to lock them alone."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:ppstream-messages")


def serve_cameras(
    tmp_path: Path, shipped: str, placed: tuple[str, ...], *, world_size: int, per_s: float
) -> str:
    """Serves them for a while, and returns what the ranks said."""
    endpoint = f"unix://{tmp_path}/r"
    settings = (f"service.endpoint={endpoint}", "service.duration_s=60", *placed)
    with Ranks(tmp_path, *settings, world_size=world_size, config=load.locate(shipped)) as ranks:
        robot = CameraRobot(endpoint, shipped)
        with robot.client as client:
            client.connect(READY_LIMIT_S)
            assert client.wait_ready(READY_LIMIT_S), ranks.output()
            robot.ages_ms.clear()
            robot.run(SERVED_S)
            time.sleep(0.2)
        for process in ranks.processes:  # as torchrun signals: all at once
            process.send_signal(signal.SIGTERM)
        assert ranks.wait() == [0] * world_size, ranks.output()  # and every sample is accounted for
        lines = list(ready_lines(ranks))
        ledger = [line for line in ranks.lines(0) if line["kind"] == "ledger"][-1]["streams"]
    age_ms = statistics.median(robot.ages_ms)
    print(f"{len(lines)} envelopes, actions {age_ms:.1f} ms old, sent {robot.sent}")
    assert len(lines) > per_s * SERVED_S
    assert age_ms < AGE_MAX_MS[shipped]
    for camera in CAMERAS:
        assert robot.sent[camera] >= 0.9 * 30 * SERVED_S
        assert ledger[camera]["received"] == robot.sent[camera]
        ages_ms = [line["input_age_ns"][camera] / NS_PER_MS for line in lines[100:]]
        print(f"{camera}: newest frame {statistics.median(ages_ms):.1f} ms old")
        assert statistics.quantiles(ages_ms, n=20)[-1] < FRAME_AGE_MAX_MS
    return ranks.output()
