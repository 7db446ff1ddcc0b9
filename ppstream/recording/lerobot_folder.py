"""Reads a LeRobotDataset v3 folder: each episode is a recording of its own. Needs pyarrow.

A stream says where it is: ``recorded = { topic = "observation.state", fields = [...] }``. A field
is an element's name or number, or the feature's own name for all of it. Frames lie in videos, which
nothing here decodes: a camera's track has stamps, and its frames cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.recording.recording import RecordedFrames, Recording, Track

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig

INFO: Final = "meta/info.json"
STATS: Final = "meta/stats.json"
TASKS: Final = "meta/tasks.parquet"
EPISODES: Final = "meta/episodes"
VERSIONS: Final = ("v3.0",)
TASK_NAMES: Final = ("task", "__index_level_0__")  # of the column with a task's text


class VideoSegment(NamedTuple):
    """The part of a video file that is an episode."""

    key: str  # of the feature
    file: Path
    from_s: float
    to_s: float
    about: dict[str, Any]  # ``feature`` and ``stats`` as the folder's description has them


class FolderEpisode(NamedTuple):
    """One episode of a folder."""

    recording: Recording
    frame_ns: NDArray[np.int64]  # [n]
    tasks: list[str]  # [n], of each frame
    videos: dict[str, VideoSegment]  # by stream


def is_lerobot_folder(path: Path) -> bool:
    """True for a folder with a LeRobot dataset's description in it."""
    return (path / INFO).is_file()


class LeRobotFolder:
    """The description of a folder; its episodes are read one at a time.

    Raises:
        ConfigError: pyarrow is missing, or the folder is damaged or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pq = need_pyarrow()
        try:
            self._info: dict[str, Any] = json.loads((path / INFO).read_text())
            version = self._info["codebase_version"]
            if version not in VERSIONS:
                raise ConfigError(
                    [f"{path}: is a LeRobot dataset {version}, want {', '.join(VERSIONS)}; "
                     "LeRobot converts older ones"]
                )  # fmt: skip
            self._fps = float(self._info["fps"])
            files = sorted((path / EPISODES).glob("*/*.parquet"))
            rows = [row for file in files for row in self._episodes_in(file)]
            self._episodes = {int(row["episode_index"]): row for row in rows}
            self._tasks = self._read_tasks()
            stats = path / STATS
            self._stats = json.loads(stats.read_text()) if stats.exists() else {}
        except ConfigError:
            raise
        except Exception as error:  # what readers raise on damaged files has no end
            raise ConfigError([f"{path}: cannot be read as a LeRobot dataset: {error}"]) from error

    @property
    def episodes(self) -> list[int]:
        """Numbers of the episodes, in order."""
        return sorted(self._episodes)

    def episode(self, index: int, streams: Sequence[StreamConfig]) -> FolderEpisode:
        """One episode with the declared streams, at the folder's rate from 0 ns on.

        Raises:
            ConfigError: its file cannot be read, or a stream is not in it; with every problem.
        """
        row = self._episodes[index]
        problems: list[str] = []
        wanted = {s.name: found for s in streams if (found := self._wanted(s, problems))}
        if problems:
            raise ConfigError(problems)
        file = self.path / self._info["data_path"].format(
            chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
        )
        columns = {key for key, numbers in wanted.values() if numbers is not None}
        read = sorted(columns | {"frame_index", "task_index"})
        try:
            table = self._pq.read_table(
                file, columns=read, filters=[("episode_index", "=", index)], partitioning=None
            )
        except Exception as error:
            raise ConfigError([f"{file}: cannot be read as parquet: {error}"]) from error
        frames = table["frame_index"].to_numpy()
        if len(frames) != row["length"] or not len(frames):
            raise ConfigError(
                [f"{file}: has {len(frames)} frames of episode {index}, want {row['length']}"]
            )
        frame_ns = np.round(frames / self._fps * NS_PER_S).astype(np.int64)
        arrays = {key: _matrix(table[key], f"{file}: {key}") for key in columns}
        tracks, videos = {}, {}
        for name, (key, numbers) in wanted.items():
            if numbers is None:
                tracks[name] = Track(frame_ns, self._frames(key, len(frames)))
                videos[name] = self._video(key, row)
            else:
                tracks[name] = Track(frame_ns, np.ascontiguousarray(arrays[key][:, numbers]))
        tasks = [self._tasks.get(int(n), "") for n in table["task_index"].to_numpy()]
        return FolderEpisode(Recording(tracks), frame_ns, tasks, videos)

    def _episodes_in(self, file: Path) -> list[dict[str, Any]]:
        names = self._pq.read_schema(file).names
        chosen = [name for name in names if not name.startswith("stats/")]
        rows: list[dict[str, Any]] = self._pq.read_table(file, columns=chosen).to_pylist()
        return rows

    def _read_tasks(self) -> dict[int, str]:
        table = self._pq.read_table(self.path / TASKS)
        (name,) = [name for name in TASK_NAMES if name in table.column_names][:1]
        numbers, texts = table["task_index"].to_pylist(), table[name].to_pylist()
        return dict(zip(numbers, texts, strict=True))

    def _wanted(
        self, stream: StreamConfig, problems: list[str]
    ) -> tuple[str, list[int] | None] | None:
        """A stream's feature, and its columns in it; None of a video."""
        features = self._info["features"]
        if stream.recorded is None:
            problems.append(
                f"streams: {stream.name!r} does not say where {self.path} has it; give it "
                'recorded = { topic = "observation.state", fields = ["observation.state"] }'
            )
            return None
        key = stream.recorded.topic
        if key not in features:
            there = ", ".join(features)
            problems.append(f"{self.path}: there is no feature {key!r}, want one of {there}")
            return None
        feature = features[key]
        if (feature["dtype"] == "video") != (stream.image is not None):
            problems.append(f"{self.path}: {key} is {feature['dtype']}, stream {stream.name!r} not")
            return None
        if feature["dtype"] == "video":
            return key, None
        names, width = _names_of(feature), int(feature["shape"][0])
        numbers: list[int] = []
        for field in stream.recorded.fields:
            if field == key:
                numbers += range(width)
            elif field in names:
                numbers.append(names.index(field))
            elif field.isdigit() and int(field) < width:
                numbers.append(int(field))
            else:
                problems.append(
                    f"{self.path}: {key} has no element {field!r}, want one of "
                    f"{', '.join(names) or f'0..{width - 1}'}, or {key} for all"
                )
        return key, numbers

    def _frames(self, key: str, count: int) -> RecordedFrames:
        shape, names = self._info["features"][key]["shape"], self._info["features"][key]["names"]
        order = [str(name) for name in names or ("height", "width", "channels")]
        size = int(shape[order.index("height")]), int(shape[order.index("width")])

        def read(number: int) -> NDArray[np.uint8]:
            raise ConfigError([f"{self.path}: frame {number} of {key} is in a video, not decoded"])

        return RecordedFrames(count, size, read, topic=key, is_readable=False)

    def _video(self, key: str, row: dict[str, Any]) -> VideoSegment:
        at = f"videos/{key}/"
        file = self.path / self._info["video_path"].format(
            video_key=key,
            chunk_index=row[at + "chunk_index"],
            file_index=row[at + "file_index"],
        )
        times = row[at + "from_timestamp"], row[at + "to_timestamp"]
        about = {"feature": self._info["features"][key], "stats": self._stats.get(key)}
        return VideoSegment(key, file, *times, about)


def need_pyarrow() -> Any:
    """Returns ``pyarrow.parquet``; raises ConfigError where it is not installed."""
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(
            ["LeRobot datasets need a package that is not installed: "
             "pip install 'ppstream[dataset]'"]
        ) from error  # fmt: skip
    return pq


def _names_of(feature: dict[str, Any]) -> list[str]:
    names = feature.get("names") or []
    if isinstance(names, dict):  # {"motors": [...]}
        names = next(iter(names.values()), [])
    return [str(name) for name in names]


def _matrix(column: Any, where: str) -> NDArray[Any]:
    """A column of scalars or lists of equal length as ``[n, D]``.

    Raises:
        ConfigError: a value is missing, or a row has more or fewer than the others.
    """
    flat = column.combine_chunks()
    if hasattr(flat, "chunks"):
        flat = flat.chunk(0)
    width, rows, missing = 1, len(flat), flat.null_count
    if hasattr(flat.type, "value_type"):
        import pyarrow.compute as pc

        widths = pc.list_value_length(flat).drop_null().unique().to_pylist()
        flat = flat.flatten()
        width, missing = len(flat) // rows, missing + flat.null_count
        if len(widths) > 1:
            sizes = ", ".join(map(str, sorted(widths)))
            raise ConfigError([f"{where}: rows of {sizes} values, want as many in each"])
    if missing:
        raise ConfigError([f"{where}: {missing} values are missing (null), want all; drop it"])
    array: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return array.reshape(-1, width)
