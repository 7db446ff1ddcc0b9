"""Inputs of a data set: recordings and episodes of LeRobot folders, split over shards by number.

An input is the unit of work: it is read, resampled and written as a whole, or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.config.rules import RECORDING_SUFFIXES
from ppstream.core.errors import ConfigError
from ppstream.recording.lerobot_folder import LeRobotFolder, VideoSegment, is_lerobot_folder
from ppstream.recording.load import load_recording
from ppstream.recording.parts import part_of
from ppstream.recording.recording import Recording

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import PipelineConfig

logger = logging.getLogger("ppstream")

NAMED: Final = 8  # of the files that are left out


class DataInput(NamedTuple):
    """A recording's file or folder, or one episode of a LeRobot folder."""

    path: Path
    episode: int | None = None

    @property
    def name(self) -> str:
        return str(self.path) if self.episode is None else f"{self.path}#{self.episode}"


class InputData(NamedTuple):
    """An input, read."""

    recording: Recording
    frame_ns: NDArray[np.int64]  # [n], where tasks change; empty: one task
    tasks: list[str]  # [n]
    videos: dict[str, VideoSegment]  # by stream
    frames: dict[str, int]  # of the recording, by topic

    def tasks_at(self, times_ns: NDArray[np.int64], task: str) -> list[str]:
        """The task of each time; ``task`` where the input names none."""
        if not self.tasks:
            return [task] * len(times_ns)
        numbers = np.maximum(self.frame_ns.searchsorted(times_ns, "right") - 1, 0)
        return [self.tasks[number] for number in numbers]


def find_inputs(paths: Iterable[str | Path]) -> list[DataInput]:
    """All inputs that the paths name, in order; of a plain folder the recordings in it.

    A warning names what else is in such a folder.

    Raises:
        ConfigError: a path names none, or one input is named twice; with every problem found.
    """
    found: list[DataInput] = []
    problems: list[str] = []
    for path in map(Path, paths):
        if is_lerobot_folder(path):
            found += [DataInput(path, number) for number in LeRobotFolder(path).episodes]
        elif path.is_dir() and not (path / "metadata.yaml").exists():
            left: list[Path] = []
            held = sorted(_recordings_in(path, left))
            found += map(DataInput, held)
            _tell_left(path, left)
            if not held:
                problems.append(
                    f"{path}: holds no recording, want {', '.join(RECORDING_SUFFIXES)} or a "
                    "ROS 2 bag"
                )
        elif path.exists():
            found.append(DataInput(path))
        else:
            problems.append(f"{path}: there is no such file or folder")
    named = {one.path for one in found}
    found = [one for one in found if part_of(one.path, -1) not in named]
    seen: dict[Any, DataInput] = {}
    for one in found:
        if other := seen.get((one.path.resolve(), one.episode)):
            problems.append(f"{one.name}: is named twice, as {other.name}, too")
        seen[one.path.resolve(), one.episode] = one
    if problems or not found:
        raise ConfigError(problems or ["no input is named"])
    return found


def _recordings_in(folder: Path, left: list[Path]) -> Iterator[Path]:
    """Files and ROS 2 bags, however deep; of a bag the folder, not the files in it.

    What is none of them is added to ``left``.
    """
    for one in folder.iterdir():
        if not one.is_dir():
            if one.suffix in RECORDING_SUFFIXES:
                yield one
            else:
                left.append(one)
        elif (one / "metadata.yaml").exists():
            yield one
        elif not one.is_symlink():
            yield from _recordings_in(one, left)
        else:
            left.append(one)


def _tell_left(folder: Path, left: Sequence[Path]) -> None:
    if left:
        names = ", ".join(sorted(str(one.relative_to(folder)) for one in left)[:NAMED])
        more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
        text = "%s: %d left out, no recordings by name: %s%s"
        logger.warning(text, folder, len(left), names, more)


def shard_of(inputs: Sequence[DataInput], shard: int, shards: int) -> list[int]:
    """Numbers of the inputs that are a shard's: every ``shards``-th one."""
    return list(range(shard, len(inputs), shards))


def read_input(one: DataInput, config: PipelineConfig) -> InputData:
    """Raises ConfigError: it cannot be read, is damaged, or lacks a stream."""
    if one.episode is not None:
        found = LeRobotFolder(one.path).episode(one.episode, config.streams)
        recording = found.recording.select(config.streams)
        return InputData(recording, found.frame_ns, found.tasks, found.videos, {})
    recording = load_recording(one.path, config.streams, config.record.robot)
    chosen = recording.select(config.streams)
    return InputData(chosen, np.zeros(0, np.int64), [], {}, recording.images)
