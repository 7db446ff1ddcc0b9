"""``ppstream resample`` with cameras: a data set has the frames that a run's windows have."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from camera_files import (
    HEIGHT,
    WIDTH,
    CameraFile,
    arm,
    camera,
    opened,
    saved,
    two_cameras,
    write_cameras,
)
from forked_process import run_forked
from recording_files import S, Samples, picture, with_camera, write_images
from resample_runs import (
    LIMIT_S,
    frames_in,
    make,
    settings,
    started,
    write_config,
    write_recording,
)
from robot_rig import wait_until
from safetensors.numpy import load_file
from stream_cases import MS, Input, config

from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import ExitCode
from ppstream.data.cutting import BatchCutter
from ppstream.data.episode import Cut, episodes_of
from ppstream.recording.load import load_recording
from ppstream.recording.mcap_writer import open_recorder

pytest.importorskip("pyarrow")


def own_recording(folder: Path, reset_at: int | None = None) -> tuple[Path, PipelineConfig]:
    """A run with 14 raw frames, every 30 ms; ``reset_at`` is a step of 10 ms."""
    recorded = with_camera(settings(), 4, 6, file=str(folder / "run.mcap"), frames="raw")
    (row,) = Input(recorded).rows
    row.open(1)
    recorder = open_recorder(recorded, "run")
    assert recorder is not None
    recorder.tap([row])
    for step in range(40):
        if step == reset_at:
            row.new_episode()
        stamp_ns = S + 10 * MS * step
        for name, dim in (("arm", 3), ("gripper", 1)):
            sample = np.full((1, dim), step, np.float32)
            row.rings[name].append(np.array([stamp_ns]), sample, stamp_ns)
        if step % 3 == 0:
            frame = picture(4, 6, step).reshape(1, -1)
            row.rings["wrist"].append(np.array([stamp_ns]), frame, stamp_ns)
    recorder.close()
    return folder / "run.mcap", recorded


def counts_in(said: str, what: str) -> dict[str, int]:
    """Numbers of the summary's lines that begin so, by topic."""
    lines = [line.removeprefix(what).split() for line in said.splitlines() if line.startswith(what)]
    return {words[2].rstrip(":"): int(words[0]) for words in lines}


def test_frames_of_an_own_recording_are_images_of_the_windows_that_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, recorded = own_recording(tmp_path)
    run = write_config(tmp_path, recorded)
    assert make(run, tmp_path / "out", path) == 0
    said = capsys.readouterr().out
    found = frames_in(tmp_path / "out")
    numbers = found["frame_index.wrist"]
    assert counts_in(said, "frames  ") == {"/row0/cameras/wrist": len(set(numbers))}
    assert counts_in(said, "frames left out") == {}
    for number, image in zip(numbers, found["observation.images.wrist"], strict=True):
        assert image["path"] is None
        assert opened(image["bytes"]).tobytes() == picture(4, 6, 3 * number).tobytes()


@pytest.mark.parametrize("reset_at", [3, 20])
def test_each_episode_of_a_recording_has_frames_of_its_own(tmp_path: Path, reset_at: int) -> None:
    path, recorded = own_recording(tmp_path, reset_at)
    run = write_config(tmp_path, recorded)
    words = (path, "--content", "episodes")
    assert make(run, tmp_path / "out", *words) == 0
    found = frames_in(tmp_path / "out")
    first = -(-reset_at // 3)  # frames of the first episode
    places = [
        number + (first if episode else 0)
        for episode, number in zip(found["episode_index"], found["frame_index.wrist"], strict=True)
    ]
    expected = [picture(4, 6, 3 * place).tobytes() for place in places]
    images = [opened(image["bytes"]).tobytes() for image in found["observation.images.wrist"]]
    assert images == expected
    assert {*places} == {*range(14)}
    assert make(run, tmp_path / "plain", *words, "--format", "safetensors") == 0
    tensors = load_file(tmp_path / "plain" / "000000.safetensors")
    assert tensors["episode_index"].tolist() == found["episode_index"]
    rows = tensors["wrist.pixels"][tensors["wrist.pixel_index"][:, 0]]
    assert [row.tobytes() for row in rows] == expected


def test_frames_may_stay_in_recordings_and_their_numbers_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, recorded = own_recording(tmp_path)
    run = write_config(tmp_path, recorded)
    assert make(run, tmp_path / "out", path, "--frames", "leave") == 0
    assert counts_in(capsys.readouterr().out, "frames left out") == {"/row0/cameras/wrist": 14}
    found = frames_in(tmp_path / "out")
    assert max(found["frame_index.wrist"]) == 13
    assert "observation.images.wrist" not in found
    assert make(run, tmp_path / "out", path) == ExitCode.CONFIG
    assert "holds a data set of other inputs" in capsys.readouterr().err


def test_a_camera_that_does_not_say_where_it_is_recorded_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_images(tmp_path, Samples.drawn())
    run = write_config(tmp_path, with_camera(settings(), 4, 6))
    assert make(run, tmp_path / "out", path) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "'wrist' is a camera, and does not say where" in said
    assert "'wrist' does not say" not in said


# ---- frames of other software's recordings -------------------------------------------------------

DAMAGED = (3, 4, 15)


class Cameras(NamedTuple):
    """Two recordings, and what a reader sees of their frames; some of one are damaged."""

    inputs: list[Path]
    frames: list[dict[str, list[Any]]]
    run: Path


@pytest.fixture
def cameras(tmp_path: Path) -> Cameras:
    folder = tmp_path / "cameras"
    folder.mkdir()
    inputs = [folder / "a.mcap", folder / "b.mcap"]
    frames = [write_cameras(inputs[0]), write_cameras(inputs[1], 1, damaged=DAMAGED)]
    for number in reversed(DAMAGED):
        del frames[1]["wrist"][number]
    return Cameras(inputs, frames, write_config(tmp_path, two_cameras()))


def windows_of(path: Path, cut: Cut) -> dict[str, np.ndarray]:
    config = two_cameras()
    recording = load_recording(path, config.streams).select(config.streams)
    (one,) = episodes_of(path, recording, config, cut).episodes
    (chunk,) = BatchCutter(config).chunks(one)
    return {name: tensor.numpy() for name, tensor in chunk.items()}


def test_safetensors_have_each_frame_that_a_window_has_once(
    cameras: Cameras, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*cameras.inputs, "--format", "safetensors")
    assert make(cameras.run, tmp_path / "out", *words) == 0
    said = capsys.readouterr().out
    written, left = counts_in(said, "frames  "), counts_in(said, "frames left out")
    for name in ("top", "wrist"):
        count = 0
        for number, (path, frames) in enumerate(zip(cameras.inputs, cameras.frames, strict=True)):
            found = load_file(tmp_path / "out" / f"{number:06d}.safetensors")
            pixels, index = found[f"{name}.pixels"], found[f"{name}.pixel_index"]
            numbers = found[f"{name}.frame_index"]
            assert numbers.tobytes() == windows_of(path, "replay")[f"{name}.frame_index"].tobytes()
            assert (pixels.dtype, pixels.shape[1:]) == (np.uint8, (HEIGHT, WIDTH, 3))
            assert index.shape == (len(found["window_end_ns"]), 2 if name == "wrist" else 1)
            assert ((index < 0) == (numbers < 0)).all()
            for row, shown in {*zip(index[index >= 0], numbers[numbers >= 0], strict=True)}:
                assert pixels[row].tobytes() == frames[name][shown].tobytes()
            assert sorted({*index[index >= 0]}) == list(range(len(pixels)))
            count += len(pixels)
        total = sum(len(frames[name]) for frames in cameras.frames)
        total += len(DAMAGED) if name == "wrist" else 0
        assert written[f"/{name}"] == count > 30
        assert left.get(f"/{name}", 0) == total - count
    (note,) = [line for line in said.splitlines() if "are left out" in line]
    assert f"note on {cameras.inputs[1]}: stream 'wrist': 3 of 25 frames of /wrist" in note
    assert "4, 5, 16; frame 4: a JPEG that does not decode" in note


def test_lerobot_s_images_are_the_newest_frames_and_jpegs_as_they_were(
    cameras: Cameras, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert make(cameras.run, out, *cameras.inputs) == 0
    table = frames_in(out)
    expected: dict[str, list[Any]] = {"top": [], "wrist": []}
    for path, frames in zip(cameras.inputs, cameras.frames, strict=True):
        found = windows_of(path, "grid")
        for name, images in expected.items():
            images += [frames[name][n] for n in found[f"{name}.frame_index"][:, -1]]
    features = json.loads((out / "meta" / "info.json").read_text())["features"]
    stats = json.loads((out / "meta" / "stats.json").read_text())
    for name, images in expected.items():
        key = f"observation.images.{name}"
        written = [row["bytes"] for row in table[key]]
        assert [opened(data).tobytes() for data in written] == [one.tobytes() for one in images]
        kind = b"\x89PNG" if name == "top" else b"\xff\xd8\xff"
        assert {data[: len(kind)] for data in written} == {kind}
        assert features[key] == {
            "dtype": "image",
            "shape": [HEIGHT, WIDTH, 3],
            "names": ["height", "width", "channels"],
        }
        mean = np.stack(images).mean((0, 1, 2)) / 255
        assert np.array(stats[key]["mean"]).shape == (3, 1, 1)
        assert np.ravel(stats[key]["mean"]) == pytest.approx(mean, abs=0.05)
        assert (np.ravel(stats[key]["q01"]) <= np.ravel(stats[key]["q50"])).all()
    jpegs = {row["bytes"] for row in table["observation.images.wrist"]}
    assert jpegs <= {saved(picture(HEIGHT, WIDTH, number)) for number in range(200)}


def test_worker_processes_change_no_byte_of_frames(cameras: Cameras, tmp_path: Path) -> None:
    assert make(cameras.run, tmp_path / "one", *cameras.inputs) == 0
    assert make(cameras.run, tmp_path / "two", *cameras.inputs, "--jobs", "2") == 0
    same_files(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("form", ["lerobot-v3", "safetensors"])
def test_small_chunks_change_no_byte_of_frames(
    form: str, cameras: Cameras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*cameras.inputs, "--format", form)
    assert make(cameras.run, tmp_path / "one", *words) == 0
    monkeypatch.setattr("ppstream.data.outputs.FRAMES_BYTES", 4000)
    assert make(cameras.run, tmp_path / "two", *words) == 0
    if form == "lerobot-v3":
        assert frames_in(tmp_path / "one") == frames_in(tmp_path / "two")
    else:
        same_files(tmp_path / "one", tmp_path / "two", "0*.safetensors")


@pytest.mark.parametrize("name", ["run.bag", "bag"])
@pytest.mark.parametrize("form", ["lerobot-v3", "safetensors"])
def test_a_bag_gives_the_data_set_of_an_mcap_file_with_the_same_messages(
    form: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_config(tmp_path, two_cameras())
    said = []
    for path in (tmp_path / "run.mcap", tmp_path / name):
        write_cameras(path, damaged=DAMAGED)
        assert make(run, tmp_path / f"of {path.name}", path, "--format", form) == 0
        said.append(capsys.readouterr().out.replace(str(path), "PATH").splitlines()[:-1])
    assert said[0] == said[1]
    assert counts_in("\n".join(said[1]), "frames  ")["/wrist"] > 10
    names = "0*.safetensors" if form == "safetensors" else "*"
    same_files(tmp_path / "of run.mcap", tmp_path / f"of {name}", names)


def same_files(one: Path, other: Path, names: str = "*") -> None:
    files = [f for f in one.rglob(names) if f.is_file() and ".resample" not in f.parts]
    assert files
    for file in files:
        assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file


@pytest.mark.multirank
@pytest.mark.parametrize("form", ["lerobot-v3", "safetensors"])
def test_killed_while_it_writes_frames_a_job_goes_on_bit_for_bit(form: str, tmp_path: Path) -> None:
    size = (240, 320)
    path = tmp_path / "run.mcap"
    with CameraFile(path) as file:
        pictures = [saved(picture(*size, number)) for number in range(8)]
        for number in range(600):
            stamp_ns = S + 20 * MS * number
            file.arm(stamp_ns, number, 1)
            file.compressed("/top", stamp_ns, pictures[number % 8])
    run = write_config(tmp_path, config(arm(), camera("top", "/top", size), steps=2, dt_ms=20))
    words = (path, "--format", form)
    out = tmp_path / "out"
    killed = started(run, out, *words)
    try:
        wait_until(lambda: [*(out / ".resample").glob("000000.*.tmp")])
    finally:
        killed.kill()
        killed.wait()
    assert killed.returncode == -signal.SIGKILL
    assert not (out / ".resample" / "000000.json").exists()
    assert make(run, out, *words) == 0
    assert make(run, tmp_path / "expected", *words) == 0
    same_files(tmp_path / "expected", out)
    assert not [*(out / ".resample").glob("*.tmp")], "what was begun is given back"


MEASURED = """
import json, resource, sys
from ppstream.data import cli, outputs

outputs.FRAMES_BYTES = 1 << 20
for words in json.loads(sys.argv[1]):
    assert cli.main(words) == 0
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_five_times_the_frames_need_no_more_memory(tmp_path: Path) -> None:
    size = (240, 320)
    pictures = [picture(*size, number) for number in range(10)]
    run = write_config(tmp_path, config(arm(), camera("top", "/top", size), steps=2, dt_ms=20))
    jobs = []
    for count in (20, 100):
        path = tmp_path / f"{count}.mcap"
        with CameraFile(path) as file:
            for number in range(count):
                stamp_ns = S + 20 * MS * number
                file.arm(stamp_ns, number, 1)
                file.image("/top", stamp_ns, pictures[number % len(pictures)], size=size)
        options = ("--config", run, "--out", tmp_path / f"out{count}", "--jobs", "1")
        jobs.append([*map(str, (*options, path))])
    measured = tmp_path / "measured.py"
    measured.write_text(MEASURED)
    done = run_forked([str(measured), json.dumps(jobs)], LIMIT_S)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    peaks = [int(words[1]) / 1024 for words in lines if words[0] == "peak"]
    pixels_mb = 80 * size[0] * size[1] * 3 / 2**20
    assert peaks[1] - peaks[0] < pixels_mb / 3, f"MB: {peaks}, all frames {pixels_mb:.0f}"


def test_videos_and_frames_are_no_data_set_together(
    cameras: Cameras, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lerobot"
    plain = write_config(tmp_path, settings())
    assert make(plain, folder, write_recording(tmp_path / "0.npz", 0)) == 0
    run = write_config(tmp_path, two_cameras())
    assert make(run, tmp_path / "out", folder, cameras.inputs[0]) == ExitCode.CONFIG
    assert f"has frames in videos, and {cameras.inputs[0]} has not" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_pillow_images_are_refused_before_anything_is_written(
    cameras: Cameras,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert make(cameras.run, tmp_path / "out", *cameras.inputs) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "JPEG and PNG need Pillow: pip install 'ppstream[record]'" in said
    assert not (tmp_path / "out").exists()
