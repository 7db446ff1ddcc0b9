"""The reader that LeRobot publishes opens what ``ppstream resample`` writes, with our numbers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.peers_environments import Unavailable, python_with
from camera_files import two_cameras, write_cameras
from resample_runs import make, settings, write_config, write_recording

from ppstream.data.cutting import BatchCutter
from ppstream.data.episode import Cut, episodes_of
from ppstream.recording.load import load_recording

pytest.importorskip("pyarrow")

PACKAGE = "datasets"
READER = Path(__file__).parents[1] / "support" / "lerobot_dataset.py"
LIMIT_S = 200
STEPS = 4
COUNT = 2
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("recordings")
    return [write_recording(folder / f"{n}.npz", n) for n in range(COUNT)]


def made(folder: Path, recordings: list[Path], content: str) -> Path:
    run = write_config(folder, settings())
    words = (*recordings, "--content", content, "--task", "pick the cube")
    assert make(run, folder / "out", *words) == 0
    return folder / "out"


def read(
    python: str, root: Path, steps: int, *keys: str, **environment: str
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    out = root.parent / "items.npz"
    done = subprocess.run(
        [python, str(READER), str(root), str(steps), str(out), *keys],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root.parent / "hf")} | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as arrays:
        return json.loads(done.stdout.splitlines()[-1]), dict(arrays)


def ours(recordings: list[Path], cut: Cut, steps: int) -> dict[str, np.ndarray[Any, Any]]:
    chunks = []
    for path in recordings:
        recording = load_recording(path).select(settings().streams)
        for one in episodes_of(path, recording, settings(), cut, steps).episodes:
            chunks += BatchCutter(settings(), steps).chunks(one)
    return {name: np.concatenate([c[name].numpy() for c in chunks]) for name in chunks[0]}


def test_delta_timestamps_of_whole_episodes_are_our_windows(
    python: str, recordings: list[Path], tmp_path: Path
) -> None:
    root = made(tmp_path, recordings, "episodes")
    keys = ("observation.state", "action", "valid.state", "age_s.state")
    facts, items = read(python, root, STEPS, *keys)
    print(f"lerobot {facts['version']}: {facts['frames']} items")
    windows = ours(recordings, "whole", STEPS)
    inside = ~items["observation.state_is_pad"]
    assert inside.any(0).all()
    for key, name in (("observation.state", "state.values"), ("action", "action.values")):
        found = items[key].reshape(windows[name].shape)
        assert found.dtype == np.float32
        assert found[inside].tobytes() == windows[name][inside].tobytes(), key
    for kind in ("valid", "age_s"):
        found = items[f"{kind}.state"].reshape(windows[f"state.{kind}"].shape)
        assert np.array_equal(found[inside], windows[f"state.{kind}"][inside]), kind
    assert facts["episodes"] == COUNT
    assert facts["frames"] == len(windows["window_end_ns"])
    assert set(facts["tasks"]) == {"pick the cube"}
    assert facts["policy"] == ["action", "observation.state"]
    assert len(facts["stats"]["observation.state"]["q99"]) == 3


def test_items_of_windows_are_the_windows_that_a_run_cuts(
    python: str, recordings: list[Path], tmp_path: Path
) -> None:
    root = made(tmp_path, recordings, "windows")
    facts, items = read(python, root, 1)
    windows = ours(recordings, "grid", STEPS)
    assert facts["fps"] == 100
    for key, name in (
        ("observation.state", "state.values"),
        ("action", "action.values"),
        ("valid.state", "state.valid"),
        ("age_s.action", "action.age_s"),
    ):
        assert items[key].shape == windows[name].shape
        assert items[key].astype(windows[name].dtype).tobytes() == windows[name].tobytes(), key
    ends_ns = windows["window_end_ns"]
    begins = np.flatnonzero(np.diff(items["episode_index"], prepend=-1))
    first = np.repeat(ends_ns[begins], np.diff([*begins, len(ends_ns)]))
    assert np.abs(items["timestamp"] - (ends_ns - first) / 1e9).max() < 1e-4


def test_images_are_the_frames_of_the_windows(python: str, tmp_path: Path) -> None:
    try:
        vision = python_with("torchvision")
    except Unavailable as error:
        pytest.skip(f"torchvision cannot be had: {error}")
    seen = str(*vision.parents[1].glob("lib/python*/site-packages"))
    inputs = [tmp_path / "a.mcap", tmp_path / "b.mcap"]
    frames = [write_cameras(path, number) for number, path in enumerate(inputs)]
    assert make(write_config(tmp_path, two_cameras()), tmp_path / "out", *inputs) == 0
    facts, items = read(python, tmp_path / "out", 1, PYTHONPATH=seen)
    cameras = ["observation.images.top", "observation.images.wrist"]
    assert facts["policy"] == [*cameras, "observation.state"]
    for key in cameras:
        camera = key.rpartition(".")[2]
        shown = items[f"frame_index.{camera}"].reshape(len(items["index"]), -1)[:, -1]
        episodes = items["episode_index"]
        expected = [frames[e][camera][n] for e, n in zip(episodes, shown, strict=True)]
        wanted = np.stack(expected).astype(np.float32).transpose(0, 3, 1, 2) / np.float32(255)
        assert items[key].shape == wanted.shape
        assert np.array_equal(items[key], wanted)
        assert np.array(facts["stats"][key]["q99"]).shape == (3, 1, 1)
