"""LeRobot v3 folders as inputs: resampled to another rate, with their tasks and videos."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from resample_runs import settings, write_config, write_recording
from stream_cases import MS, config, stream

from ppstream.config.schema import ImageConfig, PipelineConfig, RecordedAs, StreamConfig
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.data import Windows
from ppstream.data.cli import main
from ppstream.data.inputs import find_inputs
from ppstream.recording.lerobot_folder import LeRobotFolder

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

VIDEO = "observation.images.front"
FRAMES = 50  # of each episode; 100 Hz
EPISODES = 3


def place(topic: str, *fields: str) -> RecordedAs:
    return RecordedAs(topic=topic, fields=fields)


def run_of(dt_ms: float = 10, *, has_camera: bool = True) -> PipelineConfig:
    joints = stream("joints", dim=2, rate_hz=100, recorded=place("observation.state", "arm.2", "0"))
    grip = stream("grip", dim=1, rate_hz=100, group="action", recorded=place("action", "action"))
    camera = StreamConfig(
        name="front",
        rate_hz=100,
        image=ImageConfig(height=8, width=12),
        recorded=place(VIDEO, VIDEO),
    )
    streams = (joints, grip, camera) if has_camera else (joints, grip)
    return config(*streams, steps=1, dt_ms=dt_ms)


def make(folder: Path, run: PipelineConfig, out: Path, *words: str | Path) -> int:
    file = write_config(folder, run)
    return main(["--config", str(file), "--out", str(out), "--jobs", "1", *map(str, words)])


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A folder with a video for the first two episodes and another for the last."""
    folder = tmp_path / "made"
    folder.mkdir()
    files = [write_recording(folder / f"{n}.npz", n) for n in range(EPISODES)]
    root = tmp_path / "dataset"
    assert make(folder, settings(), root, *files, "--content", "episodes", "--task", "pick") == 0
    info = json.loads((root / "meta" / "info.json").read_text())
    names = ["height", "width", "channels"]
    info["features"][VIDEO] = {"dtype": "video", "shape": [8, 12, 3], "names": names}
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (root / "meta" / "info.json").write_text(json.dumps(info))
    table = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    rows = pq.read_table(table, partitioning=None).to_pylist()
    for row, (file, begin) in zip(rows, ((0, 0.0), (0, 0.5), (1, 0.0)), strict=True):
        times = {"from_timestamp": begin, "to_timestamp": begin + row["length"] / 100}
        about = {"chunk_index": 0, "file_index": file} | times
        row |= {f"videos/{VIDEO}/{name}": value for name, value in about.items()}
    pq.write_table(pa.Table.from_pylist(rows), table)
    videos = root / "videos" / VIDEO / "chunk-000"
    videos.mkdir(parents=True)
    for number in range(2):
        (videos / f"file-{number:03d}.mp4").write_bytes(bytes([number]) * 1000)
    return root


def frames_of(root: Path) -> dict[str, list[Any]]:
    file = root / "data" / "chunk-000" / "file-000.parquet"
    found: dict[str, list[Any]] = pq.read_table(file, partitioning=None).to_pydict()
    return found


def test_at_its_own_rate_frames_and_videos_are_what_they_were(
    dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert make(tmp_path, run_of(), out, dataset, "--task", "another") == 0
    before, after = frames_of(dataset), frames_of(out)
    chosen = [[row[2], row[0]] for row in before["observation.state"]]
    assert after["observation.state"] == chosen
    assert after["action"] == before["action"]
    assert after["episode_index"] == before["episode_index"]
    assert after["frame_index.front"] == before["frame_index"]
    assert LeRobotFolder(out).episodes == list(range(EPISODES))
    assert pq.read_table(out / "meta" / "tasks.parquet")["__index_level_0__"][0].as_py() == "pick"
    for number in range(2):
        place = Path("videos") / VIDEO / "chunk-000" / f"file-{number:03d}.mp4"
        assert (out / place).read_bytes() == (dataset / place).read_bytes()
    info = json.loads((out / "meta" / "info.json").read_text())
    assert info["features"][VIDEO]["dtype"] == "video", "each frame has one of its own"
    rows = pq.read_table(
        out / "meta" / "episodes" / "chunk-000" / "file-000.parquet", partitioning=None
    ).to_pylist()
    assert [row[f"videos/{VIDEO}/file_index"] for row in rows] == [0, 0, 1]
    assert [row[f"videos/{VIDEO}/from_timestamp"] for row in rows] == [0.0, 0.5, 0.0]


def test_statistics_of_videos_are_those_of_all_folders(dataset: Path, tmp_path: Path) -> None:
    other = shutil.copytree(dataset, tmp_path / "other")
    kept = {"std": [[[0.1]]], "min": [[[0.0]]], "max": [[[1.0]]]}
    for root, mean, count in ((dataset, 0.2, 300), (other, 0.8, 100)):
        file = root / "meta" / "stats.json"
        stats = json.loads(file.read_text())
        stats[VIDEO] = {**kept, "mean": [[[mean]]], "count": [count]}
        file.write_text(json.dumps(stats))
    out = tmp_path / "out"
    assert make(tmp_path, run_of(), out, dataset, other) == 0
    found = json.loads((out / "meta" / "stats.json").read_text())[VIDEO]
    assert (found["count"], found["min"], found["max"]) == ([400], [[[0.0]]], [[[1.0]]])
    assert found["mean"][0][0][0] == pytest.approx(0.35)
    assert found["std"][0][0][0] == pytest.approx((0.1**2 + 0.75 * 0.25 * 0.6**2) ** 0.5)


def test_at_another_rate_a_column_names_the_frame_and_no_video_is_declared(
    dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert make(tmp_path, run_of(dt_ms=4), out, dataset, "--content", "episodes") == 0
    found = frames_of(out)
    first = [i for i, episode in enumerate(found["episode_index"]) if episode == 0]
    times_ms = 4 * np.arange(len(first))
    assert [found["frame_index.front"][i] for i in first] == (times_ms // 10).tolist()
    assert [found["age_s.front"][i] for i in first] == pytest.approx(times_ms % 10 / 1000)
    before = np.array(frames_of(dataset)["observation.state"])[: len(first), 2]
    expected = np.interp(times_ms, 10 * np.arange(len(before)), before)
    after = np.array(found["observation.state"])[first, 0]
    assert after[:100] == pytest.approx(expected[:100], abs=1e-6)
    info = json.loads((out / "meta" / "info.json").read_text())
    assert (VIDEO in info["features"], info["video_path"], info["fps"]) == (False, None, 250)
    assert (out / "videos" / VIDEO / "chunk-000" / "file-001.mp4").exists()


def test_windows_feed_training_from_a_folder(dataset: Path) -> None:
    data = Windows(dataset, run_of(), 8, shuffle=False)
    batch = next(iter(data.batches()))
    assert batch["front.frame_index"].tolist() == [[n] for n in range(8)]
    assert batch["window_end_ns"].tolist() == [10 * MS * n for n in range(8)]


def test_what_a_folder_lacks_is_named_all_at_once(
    dataset: Path, tmp_path: Path, capsys: Any
) -> None:
    wrong = [
        stream("a", dim=1, recorded=place("observation.speed", "0")),
        stream("b", dim=1, recorded=place("observation.state", "elbow")),
        stream("c", dim=3),
        stream("d", dim=1, recorded=place(VIDEO, "0")),
    ]
    (dataset / "data" / "chunk-000" / "file-000.parquet").write_bytes(b"PAR1")
    assert make(tmp_path, config(*wrong), tmp_path / "out", dataset) == ExitCode.CONFIG
    said = capsys.readouterr().err
    for text in ("no feature 'observation.speed'", "no element 'elbow', want one of arm.0, arm.1"):
        assert text in said
    assert "'c' does not say where" in said
    assert f"{VIDEO} is video, stream 'd' not" in said
    assert make(tmp_path, run_of(), tmp_path / "other", dataset) == ExitCode.CONFIG
    assert "file-000.parquet: cannot be read as parquet" in capsys.readouterr().err


def test_a_folder_of_another_version_is_refused(dataset: Path) -> None:
    file = dataset / "meta" / "info.json"
    info = json.loads(file.read_text()) | {"codebase_version": "v2.1"}
    file.write_text(json.dumps(info))
    with pytest.raises(ConfigError, match=r"v2\.1, want v3\.0"):
        find_inputs([dataset])
    file.write_bytes(msgspec.json.encode({"fps": 3}))
    with pytest.raises(ConfigError, match="cannot be read as a LeRobot dataset"):
        find_inputs([dataset])


@pytest.mark.parametrize(
    ("row", "said"),
    [(None, "1 values are missing (null)"), ([0.0], "rows of 1, 3 values, want as many in each")],
)
def test_a_row_that_lacks_values_is_refused(
    dataset: Path, tmp_path: Path, row: list[float] | None, said: str, capsys: Any
) -> None:
    (file,) = (dataset / "data").rglob("*.parquet")
    table = pq.read_table(file, partitioning=None)
    at = table.schema.get_field_index("observation.state")
    values = table.column(at).to_pylist()
    values[3] = row
    column = pa.array(values, pa.list_(pa.float32()))
    pq.write_table(table.set_column(at, "observation.state", column), file)
    assert make(tmp_path, run_of(), tmp_path / "out", dataset) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert f"observation.state: {said}" in error
