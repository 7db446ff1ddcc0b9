from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_cases import MS, Input, at_ms, config, ramp, stream
from torch import Tensor

from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import ConfigError
from ppstream.ingest.rows import Need
from ppstream.ingest.sources import RecordedSource, Source
from ppstream.pipeline.flight import owners_of

DATA = os.environ.get("PPSTREAM_TEST_DATA")
S = 1000 * MS
LEASE = 100 * MS
HOST = 5_000 * S  # rank 0's clock when a test begins
torch.set_num_threads(1)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A fast stream over 0..400 ms and a slow one over 25..325 ms, shifted by 10 s."""
    fast = at_ms(*(10_000 + np.arange(0, 401, 4)))
    slow = at_ms(*(10_025 + np.arange(0, 301, 30)))
    path = tmp_path / "run.npz"
    arrays = {
        "fast.stamps_ns": fast,
        "fast.values": ramp(fast, 1),
        "slow.stamps_ns": slow,
        "slow.values": ramp(slow, 1),
    }
    np.savez(path, allow_pickle=False, **arrays)
    return path


def settings(windows: str = "live", rows: int = 1) -> PipelineConfig:
    return config(
        stream("fast", dim=1, rate_hz=250),
        stream("slow", dim=1, rate_hz=33),
        steps=4,
        dt_ms=20,
        rows=rows,
        windows=windows,
    )


def open_source(
    path: Path, windows: str = "live", speed: float | None = 1.0, **more: bool
) -> tuple[RecordedSource, Input]:
    case = Input(settings(windows))
    source = RecordedSource(path, case.config, case.rows, speed, **more)
    as_protocol: Source = source  # for the type checker
    assert as_protocol.fds == ()
    return source, case


def copy(out: Mapping[str, Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in out.values()]


def test_live_samples_appear_at_their_stamps(recorded: Path) -> None:
    source, case = open_source(recorded)
    fast, slow = case.rows[0].rings.values()
    assert source.drain(HOST) == 1
    assert source.drain(HOST + 3 * MS) == 0
    assert source.next_due_ns() == pytest.approx(HOST + 4 * MS, abs=2)
    assert source.drain(HOST + 30 * MS) == 7 + 1
    assert (fast.newest_ns, slow.newest_ns) == (10_028 * MS, 10_025 * MS)
    assert fast.newest_rx_ns == HOST + 30 * MS
    assert not source.exhausted
    source.drain(HOST + 399 * MS)
    assert not source.exhausted
    source.drain(HOST + 400 * MS)
    assert source.exhausted
    assert source.next_due_ns() is None
    assert (fast.accepted, slow.accepted) == (101, 11)
    case.check()


def test_speed_divides_the_time_and_leaves_the_stamps(recorded: Path) -> None:
    source, case = open_source(recorded, speed=10.0)
    source.drain(HOST)
    source.drain(HOST + 20 * MS)
    assert case.rows[0].reference.newest_ns == 10_200 * MS
    source.drain(HOST + 40 * MS)
    assert source.exhausted


def test_live_windows_without_a_speed_are_a_mistake(recorded: Path) -> None:
    with pytest.raises(ValueError, match="live windows need a speed"):
        open_source(recorded, speed=None)


def test_a_repeated_recording_goes_on_in_time_without_a_drop(recorded: Path) -> None:
    source, case = open_source(recorded, repeat=True)
    fast, slow = case.rows[0].rings.values()
    now = HOST
    while now < HOST + 2 * S:
        source.drain(now)
        due = source.next_due_ns()
        assert due is not None
        assert due > now
        assert due - now <= 5 * MS
        case.cutter.cut(case.slot(), [None], LEASE)
        now = due
    assert not source.exhausted
    assert fast.accepted == pytest.approx(500, abs=2)
    assert slow.accepted == pytest.approx(55, abs=2)
    assert fast.ledger.dropped == slow.ledger.dropped == {}


def test_a_long_pause_is_caught_up_over_several_laps(recorded: Path) -> None:
    source, case = open_source(recorded, repeat=True)
    source.drain(HOST)
    source.drain(HOST + 10 * S)
    assert case.rows[0].reference.newest_ns == pytest.approx(20_000 * MS, abs=4 * MS)
    assert case.rows[0].reference.accepted == pytest.approx(2500, abs=2)
    case.check()


def test_scheduled_windows_end_every_dt_from_when_all_streams_have_begun(recorded: Path) -> None:
    source, _ = open_source(recorded, "scheduled", speed=None)
    assert source.windows == 1 + (400 - 25) // 20
    ends = []
    while source.window_ready(len(ends)):
        assert not source.exhausted
        source.drain(HOST)
        ends += source.window_ends_ns(len(ends))
    assert ends == at_ms(*(10_025 + 20 * np.arange(source.windows))).tolist()
    assert source.exhausted


def test_every_scheduled_window_has_the_streams_that_a_policy_needs(tmp_path: Path) -> None:
    """Of a reference stream that is slower than the schedule, and one that begins behind it."""
    slow, needed = at_ms(*range(10_000, 12_000, 500)), at_ms(*range(10_025, 12_000, 33))
    arrays = {"slow.stamps_ns": slow, "needed.stamps_ns": needed}
    arrays |= {"slow.values": ramp(slow, 1), "needed.values": ramp(needed, 1)}
    np.savez(tmp_path / "run.npz", allow_pickle=False, **arrays)
    case_config = config(
        stream("slow", dim=1, rate_hz=2, reference=True),
        stream("needed", dim=1, rate_hz=30),
        windows="scheduled",
    )
    case = Input(case_config, needs={"needed": Need(40 * MS)})
    source = RecordedSource(tmp_path / "run.npz", case_config, case.rows, None)
    source.drain(HOST)
    out = case.slot()
    for number in range(source.windows):
        info = case.cutter.cut(out, source.window_ends_ns(number), LEASE)
        assert out["present"].all()
        assert owners_of(case.rows, info.window_end_ns, LEASE)[0].present
    assert number > 140


def test_scheduled_windows_are_taken_in_turn(recorded: Path) -> None:
    source, _ = open_source(recorded, "scheduled", speed=None)
    source.window_ends_ns(0)
    with pytest.raises(AssertionError, match="window 0 asked for, 1 is next"):
        source.window_ends_ns(0)


def test_a_scheduled_window_waits_for_the_recording_s_time(recorded: Path) -> None:
    source, _ = open_source(recorded, "scheduled", speed=2.0)
    assert not source.window_ready(0)
    source.drain(HOST)
    assert not source.window_ready(0)
    due = source.next_due_ns()
    assert due == pytest.approx(HOST + 12.5 * MS, abs=2)
    assert due is not None
    source.drain(due)
    assert source.window_ready(0)
    assert not source.window_ready(1)


def scheduled_run(
    path: Path, case_config: PipelineConfig, *, speed: float | None, step_ns: int
) -> list[list[bytes]]:
    """All windows of a recording, while time passes in steps of ``step_ns``."""
    case = Input(case_config)
    source = RecordedSource(path, case.config, case.rows, speed)
    out = case.slot()
    windows: list[list[bytes]] = []
    now = HOST
    while not source.exhausted:
        source.drain(now)
        if source.window_ready(len(windows)):
            case.cutter.cut(out, source.window_ends_ns(len(windows)), LEASE)
            windows.append(copy(out))
            case.check()
        now += step_ns
    return windows


def test_scheduled_windows_do_not_depend_on_how_fast_anything_ran(recorded: Path) -> None:
    case_config = settings("scheduled")
    once = scheduled_run(recorded, case_config, speed=None, step_ns=0)
    assert len(once) == 19
    assert once == scheduled_run(recorded, case_config, speed=None, step_ns=7 * S)
    assert once == scheduled_run(recorded, case_config, speed=1.0, step_ns=9 * MS)
    assert once == scheduled_run(recorded, case_config, speed=50.0, step_ns=3 * MS)
    assert once[0] != once[1]


def test_a_hole_in_a_recording_is_no_jump_of_the_clock(tmp_path: Path) -> None:
    stamps = at_ms(*range(0, 100, 10), *range(5_000, 5_100, 10))
    np.savez(
        tmp_path / "run.npz",
        allow_pickle=False,
        **{"joints.stamps_ns": stamps, "joints.values": ramp(stamps)},
    )
    case = Input(config(stream(rate_hz=100), dt_ms=20, windows="scheduled"))
    source = RecordedSource(tmp_path / "run.npz", case.config, case.rows, None)
    for window in range(source.windows):
        case.cutter.cut(case.slot(), source.window_ends_ns(window), LEASE)
    ledger = case.rows[0].reference.ledger
    assert (ledger.received, ledger.used) == (19, 19)  # the last is behind the last window


def test_a_recording_whose_reference_ends_before_another_begins_is_refused(tmp_path: Path) -> None:
    fast, slow = at_ms(1, 2), at_ms(50)
    np.savez(
        tmp_path / "run.npz",
        allow_pickle=False,
        **{
            "fast.stamps_ns": fast,
            "fast.values": ramp(fast, 1),
            "slow.stamps_ns": slow,
            "slow.values": ramp(slow, 1),
        },
    )
    with pytest.raises(ConfigError, match="'fast' ends before another one begins"):
        open_source(tmp_path / "run.npz")


@pytest.mark.skipif(DATA is None, reason="PPSTREAM_TEST_DATA names no folder of recordings")
def test_the_1_khz_arm_plays_through_windows_with_every_sample_accounted_for() -> None:
    assert DATA is not None
    streams = [stream(name, dim=7) for name in ("q", "dq", "tau")]
    pose = stream("ee_pose", dim=7, max_gap_ms=2.0)
    case = Input(config(*streams, pose, steps=16, dt_ms=5, windows="scheduled"))
    source = RecordedSource(Path(DATA) / "franka_fr3_1khz.npy", case.config, case.rows, None)
    out = case.slot()
    valid = []
    for window in range(source.windows):
        ends_ns = source.window_ends_ns(window)
        info = case.cutter.cut(out, ends_ns, LEASE)
        valid.append(out["state.valid"][0].numpy().copy())
        ages = [info.input_age_ns[name] for name in ("q", "ee_pose")]
        assert all(isinstance(age, int) and 0 <= age < 4 * MS for age in ages)
    assert source.windows == 1995
    assert np.array(valid)[16:, :, :3].all()
    masked = 1 - np.array(valid)[16:, :, 3].mean()
    assert 0.001 < masked < 0.03  # some of the gaps, up to 3.8 ms, are beyond its limit
    case.check()
    for ring in case.rows[0].rings.values():
        ledger = ring.ledger
        assert 9546 - 6 <= ledger.received <= 9546  # less than one dt is behind the last window
        assert (ledger.used, ledger.dropped) == (ledger.received, {})
