"""Bring-up of the device-ordered loops on a recording, over a driver of threads."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_in_process import DevicePipeline
from pipeline_in_process import NewestValues
from recorded_runs import CONFIG, arm_recording

from ppstream.config import load
from ppstream.core.errors import ConfigError, GateFailedError
from ppstream.core.specs import TensorSpec
from ppstream.launch.dry_run import describe
from ppstream.pipeline.bringup import bring_up
from ppstream.recording.load import load_recording

A_S, B_S, C_S = 0.006, 0.008, 0.0005
STEPS, DT_NS, SEEN = 64, 4_000_000, 16  # of the window; how many of its newest are looked at
JOINTS = 7
FLOAT32 = 2e-6  # relative to joint angles of some radians


class Arm(NewestValues):
    """Takes ``B_S``, and keeps where each window ended and its newest joint angles."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (TensorSpec("state.values", (STEPS, 35)),)
        self.outputs = (TensorSpec("actions", (SEEN, JOINTS)),)
        self.seen: list[tuple[int, np.ndarray]] = []

    def __call__(self, window: Any, out: Any) -> None:
        time.sleep(B_S)
        values = window["state.values"][0, -SEEN:, :JOINTS]
        self.seen.append((int(window["rows"][0, 2]), values.numpy().copy()))
        out["actions"].zero_()


class Bench:
    """A device-ordered pipeline of the recorded arm, and what ``bring_up`` wants of a run."""

    def __init__(self, depth: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.recording = arm_recording(folder)
        settings = (
            f"bringup.recording={self.recording}",
            f"pipeline.d_in={depth}",
            f"pipeline.d_out={depth}",
            "bringup.envelopes=120",
            "bringup.standalone=20",
            "actions.lease_ms=60000",
            "bringup.accept=['CONTENDED']",  # by what else runs on the machine
        )
        self.config = load.read(str(CONFIG), settings)
        self.policy = Arm()
        self.pipeline = DevicePipeline(self.config, self.policy, folder, patch, a_s=A_S, c_s=C_S)
        self.run: Any = SimpleNamespace(directory=folder, describe=self._describe)
        self._manifest: dict[str, Any] = {"schema": "ppstream.log/1", "run_id": "r"}
        ranks = [{"rank": rank, "link": "peer", "stamp_source": "device"} for rank in (0, 1)]
        shape = {"world_size": 2, "d_in": depth, "d_out": depth, "threads": "split"}
        form = {"order": "send_first", "credit": "before_window", "pacing": "saturated"}
        self._describe(topology={**shape, **form, "replicas": 1, "ranks": ranks})

    def _describe(self, **more: Any) -> None:
        self._manifest.update(more)
        (self.run.directory / "run.json").write_text(json.dumps(self._manifest))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.set_num_threads(1)
    return partial(Bench, folder=tmp_path, patch=monkeypatch)


@pytest.mark.alone
def test_depth_two_earns_ready_on_windows_cut_from_the_recording(bench: Any) -> None:
    made = bench(2)
    with made.pipeline as pipeline:
        bring_up(pipeline.rank0, pipeline.intake, None, made.run)
    assert not pipeline.intake.rows[0].session  # given back
    track = load_recording(made.recording).tracks["q"]
    ends_ns = [end for end, _ in made.policy.seen]
    assert set(ends_ns) <= set(track.stamps_ns.tolist())  # the first lap
    assert len(set(ends_ns)) > 50
    steps = np.arange(1 - SEEN, 1) * DT_NS
    for end_ns, values in made.policy.seen[-100:]:
        at_ns = (end_ns + steps - track.stamps_ns[0]).astype(np.float64)
        stamps = (track.stamps_ns - track.stamps_ns[0]).astype(np.float64)
        expected = [np.interp(at_ns, stamps, track.values[:, joint]) for joint in range(JOINTS)]
        np.testing.assert_allclose(values.T, expected, rtol=FLOAT32, atol=FLOAT32)


def test_depth_one_is_refused_because_only_stage_c_is_hidden(bench: Any) -> None:
    made = bench(1)
    with (
        made.pipeline as pipeline,
        pytest.raises(GateFailedError, match=r"FAIL: LOW_OVERLAP(, CONTENDED)?; load"),
    ):
        bring_up(pipeline.rank0, pipeline.intake, None, made.run)


def test_the_shipped_policy_fits_the_arm_that_was_recorded(tmp_path: Path) -> None:
    cpus = ("placement.rank0=cpu", "placement.policy=cpu", "simulate.kind=sleep")
    recording = f"bringup.recording={arm_recording(tmp_path)}"
    text = describe(load.read(str(CONFIG), (recording, *cpus)), 2)
    assert "ppstream_stages.act:build" in text
    assert "no problem found" in text


def test_without_its_recording_the_configuration_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"bringup\.recording: missing, want a file"):
        load.read("recorded_arm")
