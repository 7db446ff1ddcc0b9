"""The device-ordered loops serve a robot through the real socket: no sample waits for the next."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from device_in_process import GPUS, DevicePipeline
from pipeline_in_process import NewestValues, small_config

from ppstream.core.clock import now_ns
from ppstream.pipeline.pacing import OnSample
from ppstream.robot.client import RobotClient
from ppstream.sessions.server import Sessions

PERIOD_NS, SAMPLES = 4_000_000, 250


class Robot(threading.Thread):
    """Sends a sample each ``PERIOD_NS``, and has the run end behind the last."""

    def __init__(self, endpoint: str, pipeline: DevicePipeline) -> None:
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self.client = RobotClient(
            endpoint, robot="arm", streams=[("joints", 3), ("imu", 2)], actions=["a", "b"]
        )
        self.together = 0  # samples that left late, with the one behind them

    def run(self) -> None:
        with self.client as client:
            client.connect(10)
            client.push("imu", now_ns(), np.zeros(2))
            due_ns, before_ns = now_ns(), 0
            for _ in range(SAMPLES):
                time.sleep(max(0, due_ns - now_ns()) * 1e-9)
                now = now_ns()
                self.together += now - before_ns < PERIOD_NS // 2
                client.push("joints", now, np.zeros(3))
                due_ns, before_ns = due_ns + PERIOD_NS, now
            self._pipeline.rank0.request_stop("test over")


@pytest.mark.flaky(reruns=2)  # a busy machine takes more samples together than are counted
def test_each_sample_of_a_robot_begins_a_window_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(*GPUS, f"service.endpoint=unix://{tmp_path}/r")
    policy = NewestValues(act=lambda _: time.sleep(0.0005))
    with DevicePipeline(config, policy, tmp_path, monkeypatch) as pipeline:
        sessions = Sessions(config, pipeline.intake.rows)
        sessions.set_wake(pipeline.rank0.waiter.wake)
        sessions.set_phase("ready")
        robot = Robot(sessions.endpoint, pipeline)
        pacing = OnSample(pipeline.intake.rows, "joints")
        intake = pipeline.intake
        pipeline.rank0.enter(
            "ready", intake=intake, source=sessions, pacing=pacing, emitter=sessions
        )
        robot.start()
        try:
            pipeline.rank0.run()
        finally:
            robot.join(20)
            sessions.close()
        lines = pipeline.envelopes()
    # a lost wake leaves half of them; a busy machine takes some that nobody lost
    assert len(lines) >= 0.7 * (SAMPLES - robot.together), (len(lines), robot.together)
