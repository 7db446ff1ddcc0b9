from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stream_cases import MS, at_ms, ramp, stream

from ppstream.core.errors import ConfigError
from ppstream.ingest.sample_ledger import CLOCK_JUMP
from ppstream.recording.load import load_recording
from ppstream.recording.recording import (
    RecordedFrames,
    RecordedStep,
    Recording,
    Track,
    arrivals_on_stamps_clock,
)

DATA = os.environ.get("PPSTREAM_TEST_DATA")
arm = pytest.mark.skipif(DATA is None, reason="PPSTREAM_TEST_DATA names no folder of recordings")


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **{name.replace("__", "."): array for name, array in arrays.items()})
    return path


def test_everything_wrong_with_an_npz_is_said_at_once(tmp_path: Path) -> None:
    stamps = at_ms(1, 2)
    path = save(
        tmp_path / "run.npz",
        a__stamps_ns=stamps,
        b__stamps_ns=stamps.astype(float),
        b__values=ramp(stamps),
        c__stamps_ns=stamps,
        c__values=ramp(stamps)[:1],
        d__stamps_ns=stamps[:0],
        d__values=ramp(stamps)[:0],
    )
    with pytest.raises(ConfigError) as error:
        load_recording(path)
    assert [problem.split(": ")[1].split(" ")[0] for problem in error.value.problems] == [
        "a.values",
        "b.stamps_ns",
        "c.values",
        "d.stamps_ns",
    ]


def test_an_npz_without_streams_says_which_keys_it_wants(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no stream found; want keys <stream>\.stamps_ns"):
        load_recording(save(tmp_path / "run.npz", something=np.zeros(3)))


def write_pickle(path: Path) -> None:
    np.save(path, np.array([{"code": 1}], dtype=object))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: None,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PK\x03\x04 torn"),
        lambda path: path.write_bytes(b"plain text"),
        write_pickle,
        lambda path: np.save(path, np.zeros((3, 41))),
        lambda path: np.save(path, np.zeros((0, 42))),
    ],
)
def test_a_file_that_is_no_recording_is_a_config_error_with_its_name(
    tmp_path: Path, write: Any
) -> None:
    path = tmp_path / "run.npy"
    write(path)
    with pytest.raises(ConfigError, match=r"run\.npy"):
        load_recording(path)


def test_an_object_array_inside_an_npz_is_never_unpickled(tmp_path: Path) -> None:
    path = save(tmp_path / "run.npz", q__stamps_ns=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match=r"run\.npz"):
        load_recording(path)


def test_a_franka_table_is_split_into_its_streams(tmp_path: Path) -> None:
    table = np.arange(2 * 42, dtype=np.float64).reshape(2, 42)
    table[:, 0] = (1.7e18, 1.7e18 + 256)
    np.save(tmp_path / "arm.npy", table)
    tracks = load_recording(tmp_path / "arm.npy").tracks
    assert list(tracks) == ["q", "dq", "tau", "tau_ext", "ee_pose"]
    assert tracks["q"].stamps_ns.tolist() == [17 * 10**17, 17 * 10**17 + 256]
    assert tracks["tau"].values[0].tolist() == list(range(15, 22))
    assert tracks["ee_pose"].values[1].tolist() == [42 + column for column in range(29, 36)]


def test_selecting_keeps_the_declared_order_and_dtype() -> None:
    stamps = at_ms(1, 2)
    values = ramp(stamps).astype(np.float64)
    recording = Recording({"a": Track(stamps, values), "b": Track(stamps, values)})
    chosen = recording.select([stream("b"), stream("a", dtype="float64")])
    assert list(chosen.tracks) == ["b", "a"]
    assert chosen.tracks["b"].values.dtype == np.float32
    assert chosen.tracks["a"].values.dtype == np.float64


def test_streams_that_do_not_fit_are_all_named() -> None:
    stamps = at_ms(1)
    recording = Recording({"a": Track(stamps, ramp(stamps))})
    with pytest.raises(ConfigError) as error:
        recording.select([stream("b"), stream("a", dim=7)])
    assert error.value.problems == [
        "streams: 'b' is not recorded, want one of a",
        "streams: 'a' has dim 7, recorded with dim 2",
    ]


@pytest.mark.parametrize("batch_ms", [0, 5, 1000])
def test_messages_hold_every_sample_once_in_order_of_time(batch_ms: int) -> None:
    fast, slow = at_ms(*range(40)), at_ms(5, 4, 20, 33)
    recording = Recording({"fast": Track(fast, ramp(fast)), "slow": Track(slow, ramp(slow))})
    messages = list(recording.messages(batch_ms * MS))
    assert [message.due_ns for message in messages] == sorted(m.due_ns for m in messages)
    for name, stamps in (("fast", fast), ("slow", slow)):
        parts = [message.stamps_ns for message in messages if message.stream == name]
        assert np.concatenate(parts).tolist() == stamps.tolist()
        assert {len(part) for part in parts} == {1} or batch_ms > 0
    for message in messages:
        assert message.due_ns >= message.stamps_ns.max()
        assert np.ptp(message.stamps_ns) < max(1, batch_ms * MS)


def test_frames_are_sent_one_by_one_whatever_goes_together() -> None:
    stamps = at_ms(*range(5))
    frames = RecordedFrames(5, (1, 1), lambda number: np.full(3, number, np.uint8))
    recording = Recording({"top": Track(stamps, frames), "fast": Track(stamps, ramp(stamps))})
    messages = [*recording.messages(1000 * MS)]
    assert [len(message.stamps_ns) for message in messages if message.stream == "fast"] == [5]
    sent = [message.values.tolist() for message in messages if message.stream == "top"]
    assert sent == [[[number] * 3] for number in range(5)]


@arm
def test_the_1_khz_arm_is_read_with_its_gaps_and_repeats() -> None:
    assert DATA is not None
    tracks = load_recording(Path(DATA) / "franka_fr3_1khz.npy").tracks
    stamps = tracks["q"].stamps_ns
    gaps_ms = np.diff(stamps) / MS
    assert len(stamps) == 9546
    assert (gaps_ms > 0).all()
    assert gaps_ms.max() == pytest.approx(3.8, abs=0.05)
    repeats = (tracks["tau"].values[1:] == tracks["tau"].values[:-1]).all(axis=1).mean()
    assert repeats == pytest.approx(0.274, abs=0.001)
    assert np.linalg.norm(tracks["ee_pose"].values[:, 3:], axis=1) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("jump_ms", [5e8, -300, -5e8])
def test_samples_of_a_clock_that_jumped_are_of_the_piece_behind_it(jump_ms: float) -> None:
    """Rank 0 tells a jump ahead some samples later; those before it keep their times."""
    came_ms = np.arange(0, 1000, 10)
    stamps = at_ms(*(1000 + came_ms + np.where(came_ms >= 500, jump_ms, 0)))
    track = Track(stamps, ramp(stamps, 1), at_ms(*(came_ms + 2)))
    tracks = arrivals_on_stamps_clock({"fast": track, "slow": track.part(0, 45)})
    steps = [RecordedStep(None, CLOCK_JUMP, {"fast": 75, "slow": 45})]
    first, second = Recording(tracks, steps).between_resets()
    held = 50 if jump_ms > 0 else 75
    for piece, begin, end in ((first, 0, held), (second, held, 100)):
        found = piece.recording.tracks["fast"]
        assert found.stamps_ns.tolist() == stamps[begin:end].tolist()
        assert len(piece.recording.tracks["slow"].stamps_ns) == (45 if piece is first else 0)
    assert first.recording.tracks["fast"].due_ns[:50].tolist() == stamps[:50].tolist()
    assert second.begin_ns - first.begin_ns == held * 10 * MS
    assert (first.reasons, second.reasons) == (set(), {CLOCK_JUMP})
