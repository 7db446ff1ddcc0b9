"""Bring-up from a recording: one that a run itself made, replayed at both depths on real ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import JUDGED_AGAIN, Ranks
from recorded_runs import (
    CONFIG,
    arm_recording,
    assert_as_the_model_says,
    assert_played,
    brought_up,
)

from ppstream.recording.load import load_recording

pytestmark = [pytest.mark.multirank, pytest.mark.alone, JUDGED_AGAIN]

#: The shipped configuration without its GPUs: stages that sleep, so that two busy cores are enough.
ON_CPUS = (
    "placement.rank0=cpu",
    "placement.policy=cpu",
    "policy.target=ppstream_stages.simulated:build",
    "policy.options={b_ms = 8.0, horizon = 16, action_dim = 7}",
    "simulate.kind=sleep",
)
STAGES = (
    *("simulate.a_ms=6", "simulate.c_ms=0.3"),
    *("bringup.envelopes=120", "bringup.standalone=15", "bringup.warmup_max=60"),
)
GAP_MAX = 0.15  # a shared machine of two cores


def test_what_a_run_recorded_brings_the_next_up_as_the_model_says(tmp_path: Path) -> None:
    taken = tmp_path / "taken.mcap"
    record = (
        "bringup.source=synthetic",
        f"service.recording={arm_recording(tmp_path)}",
        "service.duration_s=1",
        f"record.file={taken}",
    )
    with Ranks(tmp_path / "recorded", *ON_CPUS, *record, config=CONFIG, world_size=1) as ranks:
        assert ranks.wait() == [0], ranks.output()
    tracks = load_recording(taken).tracks
    assert all(len(tracks[name].stamps_ns) > 500 for name in ("q", "tau_ext"))
    settings = (*ON_CPUS, *STAGES)
    one, two = (brought_up(tmp_path / f"d{d}", taken, d, *settings) for d in (1, 2))
    assert_as_the_model_says(one, two, GAP_MAX)
    assert_played(two, taken)


def test_a_recording_that_cannot_be_served_is_refused_before_anything_is_warmed(
    tmp_path: Path,
) -> None:
    stamps = np.arange(2000, dtype=np.int64) * 1_000_000
    np.savez(tmp_path / "q.npz", **{"q.stamps_ns": stamps, "q.values": np.zeros((2000, 7))})
    settings = (*ON_CPUS, f"service.recording={tmp_path / 'q.npz'}", "bringup.source=synthetic")
    with Ranks(tmp_path / "refused", *settings, config=CONFIG) as ranks:
        assert ranks.wait() == [11, 11], ranks.output()
        assert [line for line in ranks.lines(0) if line.get("name") == "phase"] == []
        assert "'tau_ext' is not recorded, want one of q" in ranks.output()
