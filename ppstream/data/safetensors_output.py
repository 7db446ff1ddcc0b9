"""Safetensors: a file of windows for each input, and ``index.json`` that describes all of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.config.schema import CHANNELS
from ppstream.config.to_toml import as_toml
from ppstream.data.outputs import (
    DataPart,
    DataSettings,
    PreparedEpisode,
    PreparedInput,
    share_invalid,
    squeezed,
)
from ppstream.data.safetensors_file import copy_frames, create, open_mapped
from ppstream.data.statistics import ColumnStatistics, QuantileBins, merged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig

INDEX: Final = "index.json"
ROWS: Final = 4096  # windows that the second pass holds at a time


class SafetensorsOutput:
    """Tensors as in an envelope, windows first; ``episode_index [W]`` and ``task_index [W]`` int64.

    Each frame of a camera c with height H and width W that a window has is there once, in
    ``c.pixels [F, H, W, 3]`` uint8 RGB, as it was recorded; ``c.pixel_index [W, n]`` int64 says
    where (-1: none). A file's metadata has ``tasks``, a JSON list of the texts that ``task_index``
    numbers.
    """

    suffix = ".safetensors"

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings

    def write(self, file: Path, one: PreparedInput) -> dict[str, Any]:
        tasks = list(dict.fromkeys(task for each in one.episodes for task in each.tasks))
        statistics: dict[str, ColumnStatistics] = {}
        invalid: dict[str, list[int]] = {}
        tensors: dict[str, NDArray[Any]] = {}
        pools = {camera.name: _PixelPool(camera, one.episodes) for camera in one.cameras}
        row = 0
        for number, each in enumerate(one.episodes):
            begun = row
            for chunk in one.chunks(each):
                chunk = {name: squeezed(array) for name, array in chunk.items()}
                size = len(chunk["window_end_ns"])
                texts = each.tasks[row - begun : row - begun + size]
                chunk["episode_index"] = np.full(size, number)
                chunk["task_index"] = np.array([tasks.index(text) for text in texts], np.int64)
                for camera, pool in pools.items():
                    found = pool.index(number, chunk[f"{camera}.frame_index"])
                    chunk[f"{camera}.pixel_index"] = found
                if not tensors:
                    shapes = {n: (a.dtype, (one.windows, *a.shape[1:])) for n, a in chunk.items()}
                    shapes |= {f"{camera}.pixels": pool.shape for camera, pool in pools.items()}
                    tensors = create(file, shapes, {"tasks": json.dumps(tasks)})
                for name, array in chunk.items():
                    tensors[name][row : row + size] = array
                    if name.endswith(".values"):
                        statistics.setdefault(name, ColumnStatistics()).add(array)
                share_invalid(chunk, invalid)
                row += size
        for camera, pool in pools.items():
            pool.copy(tensors[f"{camera}.pixels"])
        for mapped in tensors.values():
            if isinstance(mapped, np.memmap):
                mapped.flush()
        return {
            "episodes": [each.episode.windows for each in one.episodes],
            "statistics": {name: each.as_dict() for name, each in statistics.items()},
            "invalid": invalid,
            "frames": {one.topic_of(camera): pool.count for camera, pool in pools.items()},
        }

    def merge(self, folder: Path, parts: Sequence[DataPart]) -> None:
        statistics = merged([part.summary["statistics"] for part in parts])
        bins = {name: QuantileBins(one) for name, one in statistics.items()}
        entries = []
        for number, part in enumerate(parts):
            file = folder / f"{number:06d}{self.suffix}"
            _link(part.file, file)
            tensors, _ = open_mapped(file)
            for name, one in bins.items():
                for begin in range(0, len(tensors[name]), ROWS):
                    one.add(np.asarray(tensors[name][begin : begin + ROWS]))
            episodes = part.summary["episodes"]
            entry = {"file": file.name, "input": part.source.name, "windows": sum(episodes)}
            entries.append(entry | {"episodes": episodes})
        index = {
            "content": self._settings.content,
            "cut": self._settings.cut,
            "files": entries,
            "statistics": {n: one.result() | bins[n].result() for n, one in statistics.items()},
            "config": as_toml(self._settings.config),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1))

    def merged_bytes(self, parts: Sequence[DataPart]) -> int:
        return 0  # files are linked


class _PixelPool:
    """Frames of one camera that an input's windows have, each once."""

    def __init__(self, camera: StreamConfig, episodes: Sequence[PreparedEpisode]) -> None:
        from ppstream.data.cutting import shown_frames

        assert camera.image is not None
        self._numbers = [shown_frames(camera, one.episode) for one in episodes]
        self._frames = [one.episode.frames[camera.name] for one in episodes]
        self._begins = np.cumsum([0, *map(len, self._numbers)])
        self.count = int(self._begins[-1])
        size = camera.image.height, camera.image.width
        self.shape = np.dtype(np.uint8), (self.count, *size, CHANNELS)

    def index(self, episode: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the frames of these numbers of an episode; -1 where there is none."""
        rows = self._begins[episode] + self._numbers[episode].searchsorted(numbers)
        return np.where(numbers < 0, -1, rows)

    def copy(self, pixels: NDArray[Any]) -> None:
        """Copies all of them into ``[F, H, W, 3]``."""
        for episode, numbers in enumerate(self._numbers):
            part = pixels[self._begins[episode] : self._begins[episode + 1]]
            copy_frames(self._frames[episode], numbers, part)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, to)
