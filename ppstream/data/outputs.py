"""OutputFormat: the contract of a data set's formats, and their input; ``job.py`` chooses one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import ConfigError
from ppstream.core.specs import VALID
from ppstream.data.episode import Cut, RecordedEpisode, episodes_of
from ppstream.data.inputs import DataInput, read_input
from ppstream.recording.camera_images import need_jpeg

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig
    from ppstream.data.cutting import BatchCutter
    from ppstream.recording.lerobot_folder import VideoSegment

Content = Literal["windows", "episodes"]
Frames = Literal["write", "leave"]

FRAMES_BYTES: Final = 32 << 20  # of pixels whose windows are cut at once


class DataSettings(msgspec.Struct, frozen=True):
    """Decisions that every input of a data set shares."""

    config: PipelineConfig  # of the live run
    format: Literal["lerobot-v3", "safetensors"]
    content: Content
    task: str = ""
    frames: Frames = "write"  # leave: in recordings, named by number

    @property
    def steps(self) -> int:
        """T of what is written: whole episodes are windows of one target."""
        return self.config.window.steps if self.content == "windows" else 1

    @property
    def cut(self) -> Cut:
        if self.content == "episodes":
            return "whole"
        return "grid" if self.format == "lerobot-v3" else "replay"


class PreparedEpisode(NamedTuple):
    """An episode, ready to be cut."""

    episode: RecordedEpisode
    tasks: list[str]  # of each window
    videos: dict[str, VideoSegment]  # by camera


class PreparedInput(NamedTuple):
    """An input's episodes, and their windows."""

    episodes: list[PreparedEpisode]
    too_short: int
    cutter: BatchCutter
    frames: dict[str, int]  # of the recording, by topic
    cameras: tuple[StreamConfig, ...]  # whose frames are to be written

    def chunks(self, one: PreparedEpisode) -> Iterator[dict[str, NDArray[Any]]]:
        """Tensors of an episode's windows in order, some at a time."""
        pixels = sum(camera.dim for camera in self.cameras)
        most = max(1, FRAMES_BYTES // pixels) if pixels else None
        for chunk in self.cutter.chunks(one.episode, most):
            yield {name: tensor.numpy() for name, tensor in chunk.items()}

    def topic_of(self, camera: str) -> str:
        """Topic that a camera's frames have in the recording."""
        return self.episodes[0].episode.frames[camera].topic

    @property
    def windows(self) -> int:
        return sum(one.episode.windows for one in self.episodes)


class DataPart(NamedTuple):
    """A finished input: its file, and what ``write`` returned."""

    source: DataInput
    file: Path
    summary: dict[str, Any]


class OutputFormat(Protocol):
    """A format; files are written for each input alone, and merged when all are there."""

    suffix: str

    def write(self, file: Path, one: PreparedInput) -> dict[str, Any]:
        """Writes an input's windows to a fresh file; returns what ``merge`` needs, for JSON."""

    def merge(self, folder: Path, parts: Sequence[DataPart]) -> None:
        """Writes the data set into an empty folder; parts stay."""

    def merged_bytes(self, parts: Sequence[DataPart]) -> int:
        """About the room that ``merge`` needs."""


def prepare(one: DataInput, settings: DataSettings) -> PreparedInput:
    """Reads an input, except for frames. Raises ConfigError as its parts do."""
    from ppstream.data.cutting import BatchCutter  # torch, which a job needs in its workers alone

    source = read_input(one, settings.config)
    found = episodes_of(one.path, source.recording, settings.config, settings.cut, settings.steps)
    prepared = [
        PreparedEpisode(each, source.tasks_at(each.ends_ns, settings.task), source.videos)
        for each in found.episodes
    ]
    cutter = BatchCutter(settings.config, settings.steps)
    cameras = tuple(
        camera
        for camera in settings.config.cameras
        if settings.frames == "write" and all(camera.name in e.frames for e in found.episodes)
    )
    return PreparedInput(prepared, found.too_short, cutter, source.frames, cameras)


def check_cameras(inputs: Sequence[DataInput], settings: DataSettings) -> None:
    """Raises ConfigError where the inputs' frames cannot be written."""
    if not settings.config.cameras or settings.frames == "leave":
        return
    videos = [one.name for one in inputs if one.episode is not None]
    others = [one.name for one in inputs if one.episode is None]
    if videos and others:
        raise ConfigError(
            [f"{videos[0]}: has frames in videos, and {others[0]} has not; make a data set of "
             "each, or give --frames leave"]
        )  # fmt: skip
    if others and settings.format == "lerobot-v3":
        need_jpeg("frames of a LeRobot data set")


def squeezed(array: NDArray[Any]) -> NDArray[Any]:
    """``[W, 1, D]`` as ``[W, D]``: of one target a window is no history."""
    return array[:, 0] if array.ndim == 3 and array.shape[1] == 1 else array


def share_invalid(chunk: dict[str, NDArray[Any]], counts: dict[str, list[int]]) -> None:
    """Adds a chunk's invalid targets, and all of them, to ``counts`` by group."""
    for name, array in chunk.items():
        if name.endswith(VALID):
            one = counts.setdefault(name.removesuffix(VALID), [0, 0])
            one[0] += int(array.size - np.count_nonzero(array))
            one[1] += array.size
