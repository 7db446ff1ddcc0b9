"""A recording in parts: each file is whole by itself, and together they are one recording."""

from __future__ import annotations

import os
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("mcap")

from mcap.reader import make_reader
from recording_files import with_camera
from robot_rig import MS, file_size_limit, make_chunk, make_config, wait_until

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.data.inputs import find_inputs
from ppstream.recording.action_file import ActionFile
from ppstream.recording.item_queue import ItemQueue
from ppstream.recording.items import Cleared, Emitted, FrameItem, Item, RowWindow, SamplesItem
from ppstream.recording.load import load_recording
from ppstream.recording.mcap_writer import RecordFile
from ppstream.recording.recording import RecordedFrames, Recording
from ppstream.recording.repeated_actions import compare_actions
from ppstream.recording.window_schedule import schedule_of

PART_MB = 0.2
CHUNK_BYTES = 1 << 17  # of a file, without compression
TURNS = 1500  # of 10 ms
RESET_TURN = 700
SIZE = 16, 20  # of frames


def made_config(part_mb: float = PART_MB) -> PipelineConfig:
    return with_camera(make_config(), *SIZE, frames="raw", part_mb=part_mb)


def turn(number: int) -> list[Item]:
    """What 10 ms of a robot bring."""
    rng, at_ns = np.random.default_rng(number), (number + 1) * 10 * MS
    stamp, values = np.int64(at_ns - MS).tobytes(), rng.normal(size=3).astype(np.float32).tobytes()
    pixels = rng.integers(256, size=(*SIZE, 3), dtype=np.uint8).tobytes()
    counts = {"joints": number + 1, "imu": number + 1, "wrist": number + 1}
    actions = rng.normal(size=(4, 2)).astype(np.float32).tobytes()
    chunk = make_chunk(number, actions=memoryview(actions), window_end_ns=at_ns)
    items: list[Item] = [
        SamplesItem("arm", "joints", number, number + 1, stamp, values, at_ns),
        SamplesItem("arm", "imu", number, number + 1, stamp, rng.normal(size=2).tobytes(), at_ns),
        FrameItem("arm", "wrist", number, at_ns - MS, pixels, at_ns),
        RowWindow("arm", at_ns, 0, number, "ready", (1, 0), at_ns, at_ns, counts),
        Emitted("arm", at_ns, chunk, ""),
    ]
    if number == RESET_TURN:
        items.append(Cleared("arm", at_ns, "new_episode", counts))
    return items


def record(path: Path, config: PipelineConfig, *, is_killed: bool = False) -> list[Path]:
    """Returns the files, in order."""
    file = RecordFile(path, config, "run")
    for begin in range(0, TURNS, 10):
        file.write([item for number in range(begin, begin + 10) for item in turn(number)])
    if not is_killed:
        file.close()
    later = sorted(path.parent.glob(f"{path.stem}.part*.mcap"))
    return [path, *later]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return record(tmp_path_factory.mktemp("parts") / "run.mcap", made_config())


def copied(parts: list[Path], folder: Path) -> list[Path]:
    for part in parts:
        (folder / part.name).write_bytes(part.read_bytes())
    return [folder / part.name for part in parts]


def content(recording: Recording) -> list[Any]:
    tracks = [
        (name, *(a.tobytes() for a in (track.stamps_ns, track.due_ns, values_of(track.values))))
        for name, track in sorted(recording.tracks.items())
    ]
    return [tracks, [*recording.steps], recording.lost, recording.images]


def values_of(values: Any) -> Any:
    return values[0 : len(values)] if isinstance(values, RecordedFrames) else values


def test_parts_are_the_recording_that_one_file_would_be(parts: list[Path], tmp_path: Path) -> None:
    assert [part.name for part in parts[:3]] == ["run.mcap", "run.part002.mcap", "run.part003.mcap"]
    whole = record(tmp_path / "whole.mcap", made_config(part_mb=1000))
    assert len(whole) == 1
    again = load_recording(parts[0])
    assert content(again) == content(load_recording(whole[0]))
    assert (len(again.steps), again.images) == (TURNS + 1, {"/arm/cameras/wrist": TURNS})
    assert schedule_of(parts[0], again, scheduled(made_config())).windows == TURNS


def scheduled(config: PipelineConfig) -> PipelineConfig:
    pipeline = msgspec.structs.replace(config.pipeline, windows="scheduled")
    return msgspec.structs.replace(config, pipeline=pipeline)


def test_a_comparison_of_actions_reads_all_parts(parts: list[Path], tmp_path: Path) -> None:
    file = ActionFile(tmp_path / "again.npz", 2)
    for number in range(TURNS):
        file.emit(0, turn(number)[4].chunk)
    file.close()
    assert compare_actions(parts[0], tmp_path / "again.npz").equal == TURNS


def test_each_part_has_its_size_its_index_and_says_which_it_is(parts: list[Path]) -> None:
    """As any MCAP tool sees them."""
    assert len(parts) > 5
    numbers, counts = [], []
    for part in parts:
        assert part.stat().st_size < PART_MB * 1e6 + 2 * CHUNK_BYTES
        with part.open("rb") as file:
            reader = make_reader(file)
            summary = reader.get_summary()
            assert summary is not None
            messages = [*reader.iter_messages()]
            facts = next(m.metadata for m in reader.iter_metadata() if m.name == "ppstream")
        assert len(messages) == summary.statistics.message_count
        numbers += [m.sequence for _, channel, m in messages if channel.topic == "/arm/actions"]
        counts.append(int(facts["part"]))
    assert counts == [*range(1, len(parts) + 1)]
    assert numbers == [*range(1, TURNS + 1)]


def test_parts_of_a_killed_run_are_read_to_its_last_whole_record(
    parts: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = record(tmp_path / "run.mcap", made_config(), is_killed=True)
    assert len(killed) == len(parts) > 1
    found = load_recording(killed[0])
    assert f"{killed[-1]} ends early" in caplog.text
    assert TURNS - 200 < len(found.tracks["imu"].stamps_ns) <= TURNS
    assert not found.lost


@pytest.mark.parametrize("damage", ["missing", "empty", "of another run"])
def test_what_is_behind_a_part_that_is_not_there_is_not_read_and_that_is_said(
    damage: str, parts: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = copied(parts, tmp_path)
    if damage == "missing":
        copies[2].unlink()
    elif damage == "empty":  # what a power cut leaves
        copies[2].write_bytes(b"")
    else:
        RecordFile(tmp_path / "other.mcap", made_config(), "other").close()
        (tmp_path / "other.mcap").rename(copies[2])
    found = load_recording(copies[0])
    assert f"what comes behind {copies[1]} is not read: " in caplog.text
    behind_ns = load_recording(parts[2]).tracks["imu"].stamps_ns[0]
    assert found.tracks["imu"].stamps_ns[-1] == behind_ns - 10 * MS


def test_a_later_part_is_played_but_its_windows_are_not_repeated(parts: list[Path]) -> None:
    found = load_recording(parts[2])
    assert not found.lost
    stamps = found.tracks["imu"].stamps_ns
    first = np.searchsorted(load_recording(parts[0]).tracks["imu"].stamps_ns, stamps[0])
    assert TURNS / 10 < first == TURNS - len(stamps)
    (reset,) = found.steps
    assert reset.samples["imu"] == RESET_TURN + 1 - first
    says = "it begins with part 3 of a run, .*, want pipeline.windows = 'live', or the first part"
    with pytest.raises(ConfigError, match=says):
        schedule_of(parts[2], found, scheduled(made_config()))


def test_a_folder_with_parts_has_one_recording(parts: list[Path], tmp_path: Path) -> None:
    assert [one.path for one in find_inputs([parts[0].parent])] == parts[:1]
    assert [one.path for one in find_inputs(parts)] == parts[:1]
    copies = copied(parts, tmp_path)
    copies[0].unlink()  # whoever needed the room
    assert [one.path for one in find_inputs([tmp_path])] == copies[1:2]


@pytest.mark.parametrize("is_begun", [True, False], ids=["full later", "full at once"])
def test_a_recording_goes_on_in_a_next_part_once_the_disk_has_room(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_begun: bool,
) -> None:
    path, asked = tmp_path / "run.mcap", []
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: asked.append(folder) or full)
    config = made_config(part_mb=1000)
    queue = ItemQueue("recording", lambda: RecordFile(path, config, "run", "raw"), 10**8)
    numbers = iter(range(RESET_TURN))

    def put_one() -> None:
        for item in turn(next(numbers)):
            queue.put(item)

    wait_until(path.exists)
    with file_size_limit(300_000 if is_begun else CHUNK_BYTES // 8):
        while not queue.statistics().failure:
            put_one()
            time.sleep(0.002)
        wait_until(lambda: is_begun or not path.exists())  # of a part without a message nothing
    queue.put(Cleared("arm", now_ns(), "session", {}))
    put_one()
    wait_until(lambda: len(asked) > 1, seconds=60)
    assert queue.statistics().failure == "File too large"
    monkeypatch.undo()
    wait_until(lambda: not queue.statistics().failure, seconds=60)
    put_one()
    last = next(numbers) - 1
    queue.close()
    names = ["run.mcap", "run.part002.mcap"] if is_begun else ["run.mcap"]
    assert sorted(one.name for one in tmp_path.iterdir()) == names
    lost = queue.statistics().dropped
    assert f"recording goes on, {lost} items are lost" in caplog.text
    found = load_recording(path)
    assert found.tracks["imu"].stamps_ns[-1] == (last + 1) * 10 * MS - MS
    assert 0 < found.lost["imu"] < lost
    assert [step.reason for step in found.steps] == ["session"]


def test_a_part_has_more_than_its_head_however_small_it_is_to_be(tmp_path: Path) -> None:
    files = record(tmp_path / "run.mcap", made_config(part_mb=1e-6))
    assert 1 < len(files) < TURNS / 10
    assert len(load_recording(files[0]).tracks["imu"].stamps_ns) == TURNS


def test_a_new_recording_takes_no_name_whose_parts_are_there(tmp_path: Path) -> None:
    record(tmp_path / "run.mcap", made_config())
    (tmp_path / "run.mcap").unlink()
    RecordFile(tmp_path / "run.mcap", made_config(), "other").close()
    assert not (tmp_path / "run.mcap").exists()
    assert (tmp_path / "run-2.mcap").exists()


def test_a_recording_takes_the_memory_of_its_numbers(parts: list[Path]) -> None:
    """A day has millions of windows, samples and frames."""
    load_recording(parts[0])  # what is imported and made once
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        found = load_recording(parts[0])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.steps) > TURNS
    assert (held - before) / TURNS < 400  # bytes


def test_a_recording_of_a_run_is_pickled(parts: list[Path]) -> None:
    found = load_recording(parts[0])
    assert content(pickle.loads(pickle.dumps(found))) == content(found)
