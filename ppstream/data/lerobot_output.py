"""LeRobotDataset v3: parquet of frames at one rate, its description, images, videos as they were.

A group ``state`` becomes ``observation.state``, ``action`` becomes ``action``, another one
``observation.<group>``. Beside them stand ``valid.<group>`` and ``age_s.<group>``, by stream, and
of a camera ``frame_index.<camera>``; LeRobot's policies read none of these. Frames of a camera that
are in no video are ``observation.images.<camera>``, of each window the newest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.config.to_toml import as_toml
from ppstream.core.clock import NS_PER_S
from ppstream.data.lerobot_images import (
    ImageColumn,
    image_array,
    image_features,
    image_key,
    image_statistics,
)
from ppstream.data.outputs import (
    DataPart,
    DataSettings,
    PreparedEpisode,
    PreparedInput,
    share_invalid,
    squeezed,
)
from ppstream.data.statistics import ColumnStatistics, QuantileBins, merged
from ppstream.recording.lerobot_folder import INFO, STATS, TASKS, need_pyarrow

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION: Final = "v3.0"
FILES_PER_CHUNK: Final = 1000
DATA_MB, VIDEO_MB = 100, 200  # of a file; as LeRobot's own
MB: Final = 1 << 20
NUMBERS: Final = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA: Final = f"data/{NUMBERS}.parquet"
EPISODES: Final = f"meta/episodes/{NUMBERS}.parquet"
VIDEOS: Final = f"videos/{{video_key}}/{NUMBERS}.mp4"
TOLERANCE_S: Final = 1e-4  # LeRobot's, of a frame's time
WHOLE_HZ: Final = 1e-3  # dt_ms has no digits for 30 Hz
INDEX_COLUMNS: Final = {  # of every such data set
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


class LeRobotOutput:
    """Frames of one target are ``[D]``, windows of several ``[T, D]``.

    Raises:
        ConfigError: pyarrow is missing.
    """

    suffix = ".parquet"

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._pq = need_pyarrow()
        rate_hz = 1000 / settings.config.window.dt_ms
        self._fps = round(rate_hz) if abs(rate_hz - round(rate_hz)) < WHOLE_HZ else rate_hz

    def write(self, file: Path, one: PreparedInput) -> dict[str, Any]:
        statistics: dict[str, ColumnStatistics] = {}
        invalid: dict[str, list[int]] = {}
        images = {camera.name: ImageColumn(camera) for camera in one.cameras}
        episodes = []
        writer = None
        try:
            for number, each in enumerate(one.episodes):
                frame, cameras = 0, _Alignment(each, self._fps)
                for chunk in one.chunks(each):
                    share_invalid(chunk, invalid)
                    columns = self._columns(chunk)
                    cameras.look(chunk, frame)
                    for name, array in columns.items():
                        statistics.setdefault(name, ColumnStatistics()).add(array)
                    columns |= self._numbers(frame, len(chunk["window_end_ns"]), number)
                    texts = each.tasks[frame : frame + len(columns["frame_index"])]
                    table = _table(columns, {"task": texts})
                    for camera, column in images.items():
                        found = image_array(column.images(number, each, chunk))
                        table = table.append_column(image_key(camera), found)
                    writer = writer or self._pq.ParquetWriter(file, table.schema)
                    writer.write_table(table, row_group_size=len(table))
                    frame += len(table)
                episodes.append({"length": frame, "videos": cameras.videos()})
        finally:
            if writer is not None:
                writer.close()
        return {
            "episodes": episodes,
            "statistics": {name: each.as_dict() for name, each in statistics.items()},
            "invalid": invalid,
            "images": {camera: column.about() for camera, column in images.items()},
            "frames": {one.topic_of(camera): column.count for camera, column in images.items()},
        }

    def merge(self, folder: Path, parts: Sequence[DataPart]) -> None:
        statistics = merged([part.summary["statistics"] for part in parts])
        bins = {name: QuantileBins(one) for name, one in statistics.items()}
        tasks: dict[str, int] = {}
        rows: list[dict[str, Any]] = []
        features: dict[str, Any] = {}
        images = image_features(parts)
        with _Files(folder, DATA, DATA_MB, self._pq) as data:
            for part in parts:
                begun = len(rows)
                for number, table in self._groups(part):
                    if len(rows) == begun + number:  # an episode begins
                        rows.append(self._begin(part, number, rows, data))
                    row = rows[-1]
                    columns = _arrays(table.drop_columns([*images]))
                    for name, each in bins.items():
                        each.add(columns[name])
                    features = features or self._features(columns)
                    texts = columns.pop("task").tolist()
                    numbers = [tasks.setdefault(text, len(tasks)) for text in texts]
                    row["tasks"] += [
                        text for text in dict.fromkeys(texts) if text not in row["tasks"]
                    ]
                    columns["task_index"] = np.array(numbers, np.int64)
                    columns["episode_index"] = np.full(len(texts), len(rows) - 1)
                    columns["index"] = row["dataset_to_index"] + np.arange(len(texts))
                    row["dataset_to_index"] += len(texts)
                    whole = _table(columns, {})
                    for name in images:
                        whole = whole.append_column(name, table[name])
                    data.write(whole)
        videos = _Videos(folder, parts)
        for row, found in zip(rows, _videos_of(parts), strict=True):
            row |= videos.copy(found)
        stats = {name: one.result() | bins[name].result() for name, one in statistics.items()}
        stats |= videos.stats | image_statistics(parts)
        self._describe(folder, rows, tasks, features | videos.features | images, stats)

    def merged_bytes(self, parts: Sequence[DataPart]) -> int:
        videos = {video["file"] for found in _videos_of(parts) for video in found}
        files = [*(part.file for part in parts), *map(Path, videos)]
        return sum(file.stat().st_size for file in files)

    def _columns(self, chunk: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        columns = {}
        for group in self._settings.config.groups:
            columns[feature_of(group)] = squeezed(chunk[f"{group}.values"])
            columns[f"valid.{group}"] = squeezed(chunk[f"{group}.valid"])
            columns[f"age_s.{group}"] = squeezed(chunk[f"{group}.age_s"])
        for camera in self._settings.config.cameras:
            for kind in ("frame_index", "valid", "age_s"):
                columns[f"{kind}.{camera.name}"] = chunk[f"{camera.name}.{kind}"]
        return columns

    def _numbers(self, begin: int, count: int, episode: int) -> dict[str, NDArray[Any]]:
        frames = begin + np.arange(count)
        times = (frames / self._fps).astype(np.float32)
        return {"timestamp": times, "frame_index": frames, "episode_index": np.full(count, episode)}

    def _groups(self, part: DataPart) -> Iterator[tuple[int, Any]]:
        """Row groups in order, each with the number of its episode in the part."""
        file = self._pq.ParquetFile(part.file)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            yield table["episode_index"][0].as_py(), table

    def _begin(
        self, part: DataPart, number: int, rows: list[dict[str, Any]], data: _Files
    ) -> dict[str, Any]:
        about = part.summary["episodes"][number]
        begun = rows[-1]["dataset_to_index"] if rows else 0
        total = sum(episode["length"] for episode in part.summary["episodes"])
        place = data.place_for(part.file.stat().st_size * about["length"] // max(1, total))
        return {
            "episode_index": len(rows),
            "tasks": [],
            "length": about["length"],
            "data/chunk_index": place[0],
            "data/file_index": place[1],
            "dataset_from_index": begun,
            "dataset_to_index": begun,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }

    def _features(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        names: dict[str, list[str] | None] = {}
        for group, streams in self._settings.config.groups.items():
            parts = [s.joints or [f"{s.name}.{i}" for i in range(s.dim)] for s in streams]
            names[feature_of(group)] = [name for part in parts for name in part]
            names[f"valid.{group}"] = names[f"age_s.{group}"] = [s.name for s in streams]
        found: dict[str, Any] = {}
        for name, array in columns.items():
            if name not in INDEX_COLUMNS and name != "task":
                shape = list(array.shape[1:]) or [1]
                labels = names.get(name) if len(shape) == 1 else None
                found[name] = {"dtype": str(array.dtype), "shape": shape, "names": labels}
        for name, dtype in INDEX_COLUMNS.items():
            found[name] = {"dtype": dtype, "shape": [1], "names": None}
        return found

    def _describe(
        self,
        folder: Path,
        rows: list[dict[str, Any]],
        tasks: Mapping[str, int],
        features: Mapping[str, Any],
        stats: Mapping[str, Any],
    ) -> None:
        import pyarrow as pa

        file = folder / EPISODES.format(chunk_index=0, file_index=0)
        file.parent.mkdir(parents=True)
        every = dict.fromkeys(name for row in rows for name in row)
        whole = [{name: row.get(name) for name in every} for row in rows]
        self._pq.write_table(pa.Table.from_pylist(whole), file)
        _write_tasks(folder / TASKS, tasks, self._pq)
        has_videos = any(one["dtype"] == "video" for one in features.values())
        info = {
            "codebase_version": VERSION,
            "robot_type": None,
            "total_episodes": len(rows),
            "total_frames": rows[-1]["dataset_to_index"],
            "total_tasks": len(tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self._fps,
            "splits": {"train": f"0:{len(rows)}"},
            "data_path": DATA,
            "video_path": VIDEOS if has_videos else None,
            "features": features,
            "ppstream": {
                "content": self._settings.content,
                "cut": self._settings.cut,
                "config": as_toml(self._settings.config),
            },
        }
        (folder / STATS).write_text(json.dumps(stats))
        (folder / INFO).write_text(json.dumps(info, indent=4))


def feature_of(group: str) -> str:
    """LeRobot's name of a group."""
    return "action" if group == "action" else f"observation.{group}"


class _Alignment:
    """Finds out whether an episode's frames are those of its videos, one by one.

    LeRobot asks a video for a frame's own time, within a tolerance, so only then can it decode.
    """

    def __init__(self, one: PreparedEpisode, fps: float) -> None:
        self._videos, self._fps = one.videos, fps
        self._aligned = dict.fromkeys(one.videos, True)
        self._first_ns = one.episode.ends_ns[0]

    def look(self, chunk: Mapping[str, NDArray[Any]], frame: int) -> None:
        expected = frame + np.arange(len(chunk["window_end_ns"]))
        since_ns = chunk["window_end_ns"] - self._first_ns
        drift_s = np.abs(since_ns / NS_PER_S - expected / self._fps).max(initial=0)
        for camera in self._videos:
            found = chunk[f"{camera}.frame_index"][:, -1]
            late_s = chunk[f"{camera}.age_s"][:, -1].max(initial=0)
            is_same = np.array_equal(found, expected) and drift_s + late_s < TOLERANCE_S
            self._aligned[camera] &= bool(is_same)

    def videos(self) -> list[dict[str, Any]]:
        return [
            one._asdict() | {"file": str(one.file), "is_aligned": self._aligned[camera]}
            for camera, one in self._videos.items()
        ]


class _Files:
    """Parquet files in turn, each begun once the one before is full."""

    def __init__(self, folder: Path, pattern: str, megabytes: int, pq: Any) -> None:
        self._folder, self._pattern, self._limit = folder, pattern, megabytes * MB
        self._pq = pq
        self._writer: Any = None
        self._sink: Any = None
        self._number = -1

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def place_for(self, size: int) -> tuple[int, int]:
        """Chunk and file for an episode of about so many bytes, which is never parted."""
        if self._sink is None or (self._sink.tell() > 4 and self._sink.tell() + size > self._limit):
            self._close()
            self._number += 1
            numbers = dict(zip(("chunk_index", "file_index"), self._place(), strict=True))
            file = self._folder / self._pattern.format(**numbers)
            file.parent.mkdir(parents=True, exist_ok=True)
            self._sink = file.open("wb")
        return self._place()

    def write(self, table: Any) -> None:
        if self._writer is None:
            self._writer = self._pq.ParquetWriter(self._sink, table.schema)
        self._writer.write_table(table, row_group_size=max(1, len(table)))

    def _place(self) -> tuple[int, int]:
        return divmod(self._number, FILES_PER_CHUNK)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._sink is not None:
            self._sink.close()
        self._writer = self._sink = None


class _Videos:
    """Copies video files, each once; declares those that LeRobot can decode at every frame."""

    def __init__(self, folder: Path, parts: Sequence[DataPart]) -> None:
        self._folder = folder
        self._copied: dict[tuple[str, str], int] = {}
        found = _videos_of(parts)
        every = {video["key"] for videos in found for video in videos}
        self._declared = {
            key
            for key in every
            if all(any(v["key"] == key and v["is_aligned"] for v in videos) for videos in found)
        }
        about = {video["key"]: video["about"] for videos in found for video in videos}
        self.features = {key: about[key]["feature"] for key in sorted(self._declared)}
        self.stats = {key: s for key in sorted(self._declared) if (s := _stats_of(key, found))}

    def copy(self, videos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Copies what an episode needs; returns its columns of the episodes' table."""
        columns: dict[str, Any] = {}
        for video in videos:
            key, file = video["key"], video["file"]
            number = self._copied.get((key, file))
            if number is None:
                number = sum(1 for other, _ in self._copied if other == key)
                self._copied[key, file] = number
            place = dict(
                zip(("chunk_index", "file_index"), divmod(number, FILES_PER_CHUNK), strict=True)
            )
            to = self._folder / VIDEOS.format(video_key=key, **place)
            if not to.exists():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)
            times = {"from_timestamp": video["from_s"], "to_timestamp": video["to_s"]}
            columns |= {f"videos/{key}/{name}": value for name, value in (place | times).items()}
        return columns


def _stats_of(key: str, found: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any] | None:
    """Statistics of a camera in several folders, each once; None: they cannot be joined."""
    stats = [video["about"]["stats"] for videos in found for video in videos if video["key"] == key]
    distinct = list({json.dumps(one, sort_keys=True): one for one in stats}.values())
    if len(distinct) == 1:
        only: dict[str, Any] | None = distinct[0]
        return only
    whole = ColumnStatistics()
    try:
        for one in distinct:
            whole.add_result(one)
    except (KeyError, TypeError, ValueError):
        return None
    return whole.result()


def _videos_of(parts: Sequence[DataPart]) -> list[list[dict[str, Any]]]:
    return [episode["videos"] for part in parts for episode in part.summary["episodes"]]


def _table(columns: Mapping[str, NDArray[Any]], texts: Mapping[str, list[str]]) -> Any:
    import pyarrow as pa

    arrays = {name: _nested(array) for name, array in columns.items()}
    return pa.table(arrays | {name: pa.array(found, pa.string()) for name, found in texts.items()})


def _nested(array: NDArray[Any]) -> Any:
    """Rows as LeRobot's schema has them: a number, a list of fixed length, or lists of lists."""
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if array.ndim == 1 or array.shape[1:] == (1,):
        return flat
    if array.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(flat, array.shape[1])
    rows, steps, width = array.shape
    inner = pa.ListArray.from_arrays(
        pa.array(np.arange(rows * steps + 1, dtype=np.int32) * width), flat
    )
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * steps), inner)


def _arrays(table: Any) -> dict[str, NDArray[Any]]:
    """The reverse of ``_table``."""
    found = {}
    for name in table.column_names:
        array, shape = table[name].combine_chunks(), [len(table)]
        while hasattr(array.type, "value_type"):
            flat = array.flatten()
            shape.append(len(flat) // max(1, len(array)))
            array = flat
        found[name] = array.to_numpy(zero_copy_only=False).reshape(shape)
    return found


def _write_tasks(file: Path, tasks: Mapping[str, int], pq: Any) -> None:
    """The texts as the index of a pandas frame, which LeRobot reads."""
    import pyarrow as pa

    index = "__index_level_0__"
    table = pa.table(
        {"task_index": pa.array(tasks.values(), pa.int64()), index: pa.array(tasks, pa.string())}
    )
    about = [
        {
            "name": name,
            "field_name": field,
            "pandas_type": kind,
            "numpy_type": numpy,
            "metadata": None,
        }
        for name, field, kind, numpy in (
            ("task_index", "task_index", "int64", "int64"),
            (None, index, "unicode", "object"),
        )
    ]
    pandas = {"index_columns": [index], "column_indexes": [], "columns": about}
    metadata = {"pandas": json.dumps(pandas | {"pandas_version": "2.0.0"})}
    pq.write_table(table.replace_schema_metadata(metadata), file)
