"""A run with a robot is recorded by its service, and the recording served again."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("mcap")

from mcap.reader import make_reader
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from robot_rig import MS, wait_until

from ppstream.config.schema import PipelineConfig, RecordConfig, ServiceConfig
from ppstream.control.peer_process import children
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.observe.run_folder import Run
from ppstream.pipeline.service import Service
from ppstream.recording.repeated_actions import compare_actions
from ppstream.robot.client import RobotClient

ORIGIN_NS = 10**17  # of the robot's clock
MAGIC = b"\x89MCAP0\r\n"  # where a file begins, and where it ends
GATEWAY = 'gateway=[{wire="openpi", listen="127.0.0.1:0", map={joints="j", imu="i"}}]'


def serve(config: PipelineConfig, folder: Path, robot: Any = None) -> None:
    """One service of the unpipelined twin, from ready to drained; ``robot`` meets its endpoint."""
    with PipelineInProcess(config, NewestValues(), folder, inline=True) as pipeline:
        run = Run(folder)
        with Service(config, run, pipeline.rank0) as service:
            if robot is not None:
                assert service.sessions is not None
                robot.begin(service.sessions.endpoint)
            try:
                service.run()
            finally:
                if robot is not None:
                    robot.end()


class Arm:
    """Pushes two streams as irregularly as this machine runs it, and begins anew half-way."""

    def begin(self, endpoint: str) -> None:
        streams = (("joints", 3), ("imu", 2))
        self.client = RobotClient(
            endpoint,
            robot="arm",
            streams=streams,
            actions=("a", "b"),
            clock=lambda: now_ns() + ORIGIN_NS,
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(10)

    def _live(self) -> None:
        rng = np.random.default_rng(5)
        with self.client:
            self.client.connect(10)
            wait_until(lambda: self.client.ready)
            for step in range(10_000):
                if self._ended.is_set():
                    return
                stamp = now_ns() + ORIGIN_NS
                self.client.push("joints", stamp, rng.normal(size=3))
                if step % 3 == 0:
                    self.client.push("imu", stamp - 2 * MS, rng.normal(size=2))
                if step == 100:
                    self.client.reset()
                time.sleep(0.002)


def with_service(config: PipelineConfig, folder: Path, **service: Any) -> PipelineConfig:
    record = RecordConfig(file=str(folder / "run.mcap"))
    return msgspec.structs.replace(config, service=ServiceConfig(**service), record=record)


def test_what_a_robot_was_answered_is_answered_again_bit_for_bit(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    live = with_service(small_config(), first, endpoint="tcp://127.0.0.1:0", duration_s=0.8)
    serve(live, first, Arm())
    replayed = with_service(
        small_config("pipeline.windows=scheduled", "service.recording=" + str(first / "run.mcap")),
        second,
        recording=str(first / "run.mcap"),
        actions_file=str(second / "actions.npz"),
    )
    serve(replayed, second)
    windows, chunks = messages(first, "/arm/windows"), messages(first, "/arm/actions")
    assert len(chunks) > 50
    assert {window["session_epoch"] for window in windows} == {0, 1}
    with np.load(second / "actions.npz") as arrays:
        again = arrays["actions"]
    assert len(again) == len(windows)
    place = {window["seq"]: number for number, window in enumerate(windows)}
    for chunk in chunks:
        said = np.array(chunk["actions"], np.float32).reshape(again.shape[1:])
        assert said.tobytes() == again[place[chunk["seq"]]].tobytes()
    found = compare_actions(first / "run.mcap", second / "actions.npz")
    assert (found.equal, found.is_whole) == (sum(not c["dropped"] for c in chunks), True)
    for folder in (
        first,
        second,
    ):  # a robot's run ends by its time, a recording's by its last sample
        events = messages(folder, "/events")
        phases = [e["fields"]["phase"] for e in events if e["name"] == "phase"]
        assert phases == ["ready", "draining"]
    # The recording of the replay is the recording again.
    assert samples(second, "arm") == samples(first, "arm")


def is_whole(folder: Path) -> bool:
    """The recording is complete: what was written has its end."""
    file = folder / "run.mcap"
    content = file.read_bytes() if file.exists() else b""
    return len(content) > 2 * len(MAGIC) and content.endswith(MAGIC)


def test_a_service_that_cannot_begin_ends_all_that_it_has_started(tmp_path: Path) -> None:
    with PipelineInProcess(small_config(), NewestValues(), tmp_path, inline=True) as pipeline:

        def held() -> tuple[list[int], set[str], int]:
            threads = {thread.name for thread in threading.enumerate()}
            return [*children(os.getpid())], threads, len(os.listdir("/proc/self/fd"))

        before = held()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            config = with_service(small_config("view.port=0"), tmp_path, endpoint=endpoint)
            with (
                pytest.raises(ConfigError, match="in use"),
                Service(config, Run(tmp_path), pipeline.rank0),
            ):
                raise AssertionError("two may not listen there")
        assert held() == before
        assert is_whole(tmp_path)


def test_a_recording_is_whole_before_a_gateway_that_stands_is_ended(tmp_path: Path) -> None:
    """A rank that has lost another one leaves within a second, a gateway within eight."""
    config = with_service(small_config(GATEWAY), tmp_path, endpoint="tcp://127.0.0.1:0")
    with (
        PipelineInProcess(config, NewestValues(), tmp_path, inline=True) as pipeline,
        ThreadPoolExecutor() as threads,
    ):
        run = Run(tmp_path)
        run.describe(run_id="stands")  # the gateway counts requests beside it
        service = Service(config, run, pipeline.rank0)
        others = {*children(os.getpid())}
        service.__enter__()
        (gateway,) = {*children(os.getpid())} - others
        os.kill(gateway, signal.SIGSTOP)
        leaving = threads.submit(service.__exit__, None, None, None)
        try:
            wait_until(lambda: is_whole(tmp_path))
            assert not leaving.done()
        finally:
            os.kill(gateway, signal.SIGCONT)
        leaving.result(60)


def messages(folder: Path, topic: str) -> list[dict[str, Any]]:
    with (folder / "run.mcap").open("rb") as file:
        found = make_reader(file).iter_messages(topics=topic)
        return [json.loads(message.data) for _, _, message in found]


def samples(folder: Path, robot: str) -> list[tuple[int, float]]:
    batches = messages(folder, f"/{robot}/samples/joints")
    last = messages(folder, f"/{robot}/windows")[-1]["samples"]["joints"]
    found = [
        (stamp, batch["values"][place * batch["dim"]])
        for batch in batches
        for place, stamp in enumerate(batch["stamps_ns"])
    ]
    return found[:last]  # behind the last window nothing is repeated
