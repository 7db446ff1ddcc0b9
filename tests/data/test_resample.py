"""``ppstream resample``: what it writes, what it does with damaged inputs, and being killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forked_process import ForkedProcess
from recording_files import Samples, write_images, write_sqlite
from resample_runs import (
    frames_in,
    make,
    settings,
    started,
    write_config,
    write_recording,
)
from robot_rig import wait_until
from safetensors.numpy import load_file
from stream_cases import config, stream

from ppstream.config.schema import RecordedAs
from ppstream.core.errors import INTERRUPTED, ExitCode
from ppstream.data.cli import SKIPPED
from ppstream.data.cutting import BatchCutter
from ppstream.data.episode import Cut, RecordedEpisode, episodes_of
from ppstream.data.inputs import find_inputs
from ppstream.recording.load import load_recording

pq = pytest.importorskip("pyarrow.parquet")

COUNT = 5


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "in"
    folder.mkdir()
    return [write_recording(folder / f"{n}.npz", n) for n in range(COUNT)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_config(tmp_path, settings())


def episode(path: Path, cut: Cut, steps: int | None = None) -> RecordedEpisode:
    config = settings()
    recording = load_recording(path).select(config.streams)
    (found,) = episodes_of(path, recording, config, cut, steps).episodes
    return found


def test_frames_of_windows_are_the_windows(
    recordings: list[Path], run: Path, tmp_path: Path
) -> None:
    assert make(run, tmp_path / "out", *recordings, "--task", "pick") == 0
    frames = frames_in(tmp_path / "out")
    begun = 0
    for number, path in enumerate(recordings):
        one = episode(path, "grid")
        (chunk,) = BatchCutter(settings()).chunks(one)
        part = slice(begun, begun + one.windows)
        found = np.array(frames["observation.state"][part], np.float32)
        assert found.tobytes() == chunk["state.values"].numpy().tobytes()
        assert frames["valid.state"][part] == chunk["state.valid"].tolist()
        assert frames["action"][part] == chunk["action.values"].tolist()
        assert frames["frame_index"][part] == list(range(one.windows))
        assert frames["episode_index"][part] == [number] * one.windows
        begun += one.windows
    assert frames["index"] == list(range(begun))
    info = json.loads((tmp_path / "out" / "meta" / "info.json").read_text())
    assert (info["total_frames"], info["total_episodes"], info["fps"]) == (begun, COUNT, 100)
    table = pq.read_table(tmp_path / "out" / "meta" / "tasks.parquet").to_pydict()
    assert table == {"task_index": [0], "__index_level_0__": ["pick"]}


def test_a_data_set_without_actions_says_so_and_how_a_stream_becomes_them(
    recordings: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_text(run.read_text().replace('group = "action"', 'group = "state"'))
    assert make(run, tmp_path / "out", recordings[0]) == 0
    said, *_ = capsys.readouterr().err.splitlines()
    assert said.startswith("resample: the data set has no column 'action', which training wants: ")
    assert 'streams arm, gripper none has group = "action"; add ' in said
    assert "action" not in frames_in(tmp_path / "out")
    assert make(run, tmp_path / "plain", recordings[0], "--format", "safetensors") == 0
    assert "no column" not in capsys.readouterr().err


def test_statistics_are_those_of_all_frames(
    recordings: list[Path], run: Path, tmp_path: Path
) -> None:
    assert make(run, tmp_path / "out", *recordings, "--content", "episodes") == 0
    values = np.array(frames_in(tmp_path / "out")["observation.state"])
    stats = json.loads((tmp_path / "out" / "meta" / "stats.json").read_text())["observation.state"]
    assert stats["count"] == [len(values)]
    for name, expected in (
        ("mean", values.mean(0)),
        ("std", values.std(0)),
        ("min", values.min(0)),
        ("max", values.max(0)),
    ):
        assert stats[name] == pytest.approx(expected.tolist(), rel=1e-9), name
    width = np.ptp(values, axis=0) / 1000
    for share in (1, 10, 50, 90, 99):
        exact = np.quantile(values, share / 100, axis=0, method="inverted_cdf")
        assert (np.abs(stats[f"q{share:02d}"] - exact) <= width).all()


def test_episodes_keep_within_one_file_and_files_within_their_limit(
    recordings: list[Path], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppstream.data.lerobot_output.DATA_MB", 0.01)
    monkeypatch.setattr("ppstream.data.lerobot_output.FILES_PER_CHUNK", 2)
    assert make(run, tmp_path / "out", *recordings) == 0
    files = sorted((tmp_path / "out" / "data").glob("*/*.parquet"))
    assert len(files) > 2
    assert files[2].parent.name == "chunk-001"
    table = pq.read_table(tmp_path / "out" / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    for row in table.to_pylist():
        place = "chunk-{:03d}/file-{:03d}.parquet".format(
            row["data/chunk_index"], row["data/file_index"]
        )
        held = pq.read_table(tmp_path / "out" / "data" / place, partitioning=None)["episode_index"]
        assert held.to_pylist().count(row["episode_index"]) == row["length"]
        assert row["dataset_to_index"] - row["dataset_from_index"] == row["length"]


def test_safetensors_have_the_windows_of_a_replay(
    recordings: list[Path], run: Path, tmp_path: Path
) -> None:
    assert make(run, tmp_path / "out", *recordings, "--format", "safetensors") == 0
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [entry["input"] for entry in index["files"]] == [str(path) for path in recordings]
    for entry, path in zip(index["files"], recordings, strict=True):
        found = load_file(tmp_path / "out" / entry["file"])
        (chunk,) = BatchCutter(settings()).chunks(episode(path, "replay"))
        for name, tensor in chunk.items():
            assert found[name].tobytes() == tensor.numpy().tobytes(), name
        assert not found["episode_index"].any()


def test_a_damaged_input_ends_the_job_and_is_named(
    recordings: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recordings[2].write_bytes(recordings[2].read_bytes()[:200])
    assert make(run, tmp_path / "out", *recordings) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert f"{recordings[2]}: cannot be read as .npz or .npy" in said
    assert not (tmp_path / "out" / "meta").exists()


def test_a_damaged_input_is_skipped_counted_and_taken_in_once_mended(
    recordings: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recordings[2].read_bytes()
    recordings[2].write_bytes(whole[:200])
    words = (*recordings, "--on-error", "skip")
    assert make(run, tmp_path / "out", *words) == SKIPPED
    said = capsys.readouterr().out
    assert f"skipped {recordings[2]}: cannot be read" in said
    assert [line.split()[-1] for line in said.splitlines()[:3]] == ["5", "4", "1"]
    assert set(frames_in(tmp_path / "out")["episode_index"]) == set(range(4))
    recordings[2].write_bytes(whole)
    assert make(run, tmp_path / "out", *words) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"resample: 5/5 {recordings[2]}: "), "four were done already"
    assert set(frames_in(tmp_path / "out")["episode_index"]) == set(range(5))
    assert make(run, tmp_path / "out", *words) == 0
    assert capsys.readouterr().err == "", "nothing was left to do"


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_input_that_has_changed_is_done_again(
    is_complete: bool, recordings: list[Path], run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert make(run, out, *recordings, *([] if is_complete else ["--shard", "1/2"])) == 0
    write_recording(recordings[1], 1, seconds=0.3)
    assert make(run, out, *recordings) == 0
    counts = np.bincount(frames_in(out)["episode_index"])
    assert counts[1] < 35 < min(counts[[0, 2, 3, 4]])


def test_when_no_input_can_be_read_nothing_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.npz").write_bytes(b"no zip")
    code = make(run, tmp_path / "out", tmp_path / "a.npz", "--on-error", "skip")
    assert code == ExitCode.CONFIG
    assert "a.npz" in capsys.readouterr().err
    assert not (tmp_path / "out" / "meta").exists()


def test_a_folder_of_something_else_is_left_alone(
    recordings: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    assert make(run, tmp_path / "out", *recordings) == ExitCode.CONFIG
    assert "is not empty and no data set" in capsys.readouterr().err
    assert make(run, tmp_path / "new", *recordings) == 0
    assert make(run, tmp_path / "new", *recordings[:2]) == ExitCode.CONFIG
    assert "holds a data set of other inputs" in capsys.readouterr().err
    assert make(run, tmp_path / "x", *recordings, recordings[0]) == ExitCode.CONFIG
    assert "is named twice" in capsys.readouterr().err


def test_worker_processes_make_the_same_data_set(
    recordings: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*recordings, "--format", "safetensors")  # with cameras the other format
    assert make(run, tmp_path / "one", *words) == 0
    capsys.readouterr()
    assert make(run, tmp_path / "two", *words, "--jobs", "2") == 0
    assert "windows" in capsys.readouterr().out
    for file in (tmp_path / "one").rglob("*"):
        if file.is_file() and ".resample" not in file.parts:
            other = tmp_path / "two" / file.relative_to(tmp_path / "one")
            assert file.read_bytes() == other.read_bytes(), file


@pytest.mark.multirank
def test_of_two_shards_one_is_killed_and_its_inputs_are_done_again_and_none_twice(
    recordings: list[Path],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert make(run, tmp_path / "expected", *recordings) == 0
    out, kept = tmp_path / "out", recordings[3].read_bytes()
    recordings[3].unlink()
    os.mkfifo(recordings[3])  # shard 1 of 2 has inputs 1 and 3, and waits in the second
    killed = started(run, out, *recordings, RANK="1", WORLD_SIZE="2")
    try:
        wait_until(lambda: (out / ".resample" / "000001.json").exists())
    finally:
        killed.kill()
        killed.wait()
    recordings[3].unlink()
    recordings[3].write_bytes(kept)
    capsys.readouterr()
    with monkeypatch.context() as torchrun:
        torchrun.setenv("RANK", "0")
        torchrun.setenv("WORLD_SIZE", "2")
        assert make(run, out, *recordings) == 0
    assert "waits for other shards" in capsys.readouterr().out
    assert not (out / "meta").exists()
    assert make(run, out, *recordings, "--shard", "1/2") == 0
    again = capsys.readouterr()
    (line,) = again.err.splitlines()
    assert line.startswith(f"resample: 2/2 {recordings[3]}: "), "input 1 was done already"
    assert f"{out}: complete" in again.out
    for file in (tmp_path / "expected").rglob("*.*"):
        if file.is_file() and ".resample" not in file.parts:
            assert file.read_bytes() == (out / file.relative_to(tmp_path / "expected")).read_bytes()


def test_shards_whose_processes_have_one_number_write_files_of_their_own(
    run: Path, recordings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers with a folder in common: here a shard runs while another one replaces."""
    out, replace, others = tmp_path / "out", os.replace, ["1/2"]

    def replaced(source: Path, target: Path) -> None:
        if others:
            assert make(run, out, *recordings, "--shard", others.pop()) == 0
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaced)
        assert make(run, out, *recordings, "--shard", "0/2") == 0
    assert make(run, tmp_path / "alone", *recordings) == 0
    assert frames_in(out) == frames_in(tmp_path / "alone")
    assert [*(out / ".resample").glob("*.tmp")] == []


def test_bad_shards_are_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("2/2", "x", "1/"):
        with pytest.raises(SystemExit) as left:
            make(run, tmp_path / "out", tmp_path, "--shard", text)
        assert left.value.code == 2
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert make(run, tmp_path / "out", tmp_path) == ExitCode.CONFIG


def test_a_stream_that_is_not_recorded_is_named(
    recordings: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_config(tmp_path, config(stream("legs")))
    assert make(run, tmp_path / "out", *recordings[:1]) == ExitCode.CONFIG
    assert "'legs' is not recorded, want one of arm, gripper" in capsys.readouterr().err


def test_frames_that_stay_in_recordings_are_counted_by_topic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        inputs.append(write_images(tmp_path / name, Samples.drawn(), frames=7))
    imu = stream("imu", dim=3, rate_hz=100)
    imu = msgspec.structs.replace(imu, recorded=RecordedAs(topic="/imu", fields=("joints",)))
    run = write_config(tmp_path, config(imu, steps=4))
    assert make(run, tmp_path / "out", *inputs) == 0
    said = capsys.readouterr().out
    for frames, topic in ((14, "/top"), (28, "/wrist/image_raw")):
        (line,) = [line for line in said.splitlines() if f"of {topic}:" in line]
        assert line.split()[:4] == ["frames", "left", "out", str(frames)]
    assert make(run, tmp_path / "out", *inputs) == 0
    assert capsys.readouterr().out == said, "a complete data set still knows"


def test_what_is_no_recording_in_a_folder_is_told_once(
    recordings: list[Path], run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = recordings[0].parent
    (folder / "more").mkdir()
    for number in range(9):
        (folder / "more" / f"{number}.csv").touch()
    (folder / "a note.txt").touch()
    assert make(run, tmp_path / "out", folder) == 0
    (line,) = [line for line in caplog.messages if "left out" in line]
    assert line.startswith(f"{folder}: 10 left out, no recordings by name: a note.txt, more/0.csv,")
    assert line.endswith("more/6.csv and 2 more")


def test_samples_that_a_live_run_refuses_are_counted(
    recordings: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(recordings[0]) as found:
        arrays = dict(found)
    arrays["arm.values"][[3, 7], 0] = np.nan
    arrays["arm.stamps_ns"][20] = arrays["arm.stamps_ns"][19]
    np.savez(recordings[0], allow_pickle=False, **arrays)
    assert make(run, tmp_path / "out", *recordings) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    (note,) = notes
    assert note.startswith(f"note on {recordings[0]}: stream 'arm': 3 of 100 samples are refused")


def made_again(run: Path, out: Path, recordings: list[Path], spoil: Callable[[], object]) -> None:
    assert make(run, out, *recordings) == 0
    kept = frames_in(out)
    spoil()
    assert make(run, out, *recordings) == 0
    assert frames_in(out) == kept


@pytest.mark.parametrize("name", ["complete.json", "000001.json"])
def test_a_damaged_state_costs_work_and_no_data(
    name: str, recordings: list[Path], run: Path, tmp_path: Path
) -> None:
    state = tmp_path / "out" / ".resample" / name
    made_again(run, tmp_path / "out", recordings, lambda: state.write_text("{"))


@pytest.mark.parametrize("name", ["meta", "data"])
def test_a_data_set_that_was_removed_is_made_again(
    name: str, recordings: list[Path], run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    made_again(run, out, recordings, lambda: shutil.rmtree(out / name))
    assert (out / "meta" / "info.json").exists()


def test_an_output_that_is_a_file_is_refused(
    recordings: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").touch()
    assert make(run, tmp_path / "out", *recordings) == ExitCode.CONFIG
    assert "out: cannot be written: Not a directory" in capsys.readouterr().err


def test_a_bag_in_a_folder_is_an_input_beside_files(recordings: list[Path]) -> None:
    folder = recordings[0].parent
    bag = write_sqlite(folder, Samples.drawn())
    (folder / "linked.npz").symlink_to(folder / "nowhere")
    found = [one.path for one in find_inputs([folder])]
    assert found == sorted([*recordings, bag, folder / "linked.npz"])


def opened(pipe: Path, held: list[int]) -> bool:
    """Holds the end to write of a pipe that somebody reads."""
    with suppress(OSError):
        held.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    return bool(held)


@pytest.fixture
def held_job(
    recordings: list[Path], run: Path, tmp_path: Path
) -> Iterator[tuple[ForkedProcess, int]]:
    """A job of two workers in a group of its own, and what the last input is held by."""
    out, kept = tmp_path / "out", recordings[4].read_bytes()
    recordings[4].unlink()
    os.mkfifo(recordings[4])  # the last one to be begun, which waits
    held: list[int] = []
    job = started(run, out, *recordings, "--jobs", "2", own_session=True)
    try:
        wait_until(lambda: len(list((out / ".resample").glob("00*.json"))) == 4)
        wait_until(lambda: opened(recordings[4], held))
        yield job, held[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    recordings[4].unlink()
    recordings[4].write_bytes(kept)
    assert make(run, out, *recordings) == 0
    assert set(frames_in(out)["episode_index"]) == set(range(COUNT))


@pytest.mark.multirank
def test_an_interrupted_job_says_so_and_goes_on(
    held_job: tuple[ForkedProcess, int], tmp_path: Path
) -> None:
    job, held = held_job
    os.killpg(job.pid, signal.SIGINT)
    os.close(held)  # what is at hand is ended
    assert job.wait(60) == INTERRUPTED
    said = (tmp_path / "out.errors").read_text()
    assert "Traceback" not in said
    assert "goes on with what is missing" in said


@pytest.mark.multirank
def test_the_workers_of_a_killed_job_end_with_it(held_job: tuple[ForkedProcess, int]) -> None:
    job, held = held_job
    job.kill()
    job.wait(60)
    wait_until(lambda: not is_group(job.pid))
    os.close(held)


def is_group(pid: int) -> bool:
    """True while a process of this group is there."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
