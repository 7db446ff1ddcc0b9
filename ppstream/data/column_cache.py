"""Episodes of many recordings, decoded once: in memory, or in files that are mapped.

A file holds the columns of one input's episodes. Mapped, any number of workers share the pages of
what they read, and a data set may be larger than the memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.config.schema import CHANNELS
from ppstream.config.to_toml import as_toml
from ppstream.data.cutting import shown_frames
from ppstream.data.disk_space import writing
from ppstream.data.episode import Cut, RecordedEpisode, episodes_of
from ppstream.data.inputs import DataInput, read_input
from ppstream.data.job import fingerprint, scratch_of
from ppstream.data.safetensors_file import copy_frames, create, open_mapped
from ppstream.data.sample_column import SampleColumn
from ppstream.recording.recording import RecordedFrames

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import PipelineConfig, StreamConfig

FORM: Final = "1"  # of a file; another one is made again
COLUMNS_MISSING: Final = "columns of {} are missing in it"
ENDS: Final = "ends_ns"
FRAMES: Final = "frames"
SHOWN: Final = "shown"  # numbers of the frames


class _MappedFrames:
    """Reads frames out of a mapped file; pickles as their place."""

    def __init__(self, file: Path, pixels: str, numbers: str) -> None:
        self._place = file, pixels, numbers
        arrays, _ = open_mapped(file)
        self._pixels, self._numbers = arrays[pixels], arrays[numbers]

    def __call__(self, number: int) -> NDArray[np.uint8]:
        frame: NDArray[np.uint8] = self._pixels[int(self._numbers.searchsorted(number))]
        return frame

    def __reduce__(self) -> tuple[type[_MappedFrames], tuple[Path, str, str]]:
        return _MappedFrames, self._place


def load_columns(
    inputs: Sequence[DataInput],
    config: PipelineConfig,
    cut: Cut,
    cache: Path | None,
    *,
    frames: bool,
) -> Iterator[list[RecordedEpisode]]:
    """Each input's episodes, in turn.

    Args:
        inputs: see ``inputs.py``.
        config: streams and window.
        cut: which windows there are.
        cache: folder of the files, made if need be; None keeps all but frames in memory.
        frames: cameras' frames are wanted, where they can be read.

    Raises:
        ConfigError: an input cannot be read, is damaged, or has no window.
        DiskFullError: the files find no room.
    """
    for one in inputs:
        if cache is None:
            yield _read(one, config, cut, frames=frames)
            continue
        wanted = frames and bool(config.cameras)
        file = cache / f"{_key(one, config, cut, wanted=wanted)}.safetensors"
        if not file.exists():
            with writing(cache, partial(COLUMNS_MISSING.format, one.name)):
                cache.mkdir(parents=True, exist_ok=True)
                _write(file, _read(one, config, cut, frames=frames), one, config)
        yield _open(file, config)


def _read(
    one: DataInput, config: PipelineConfig, cut: Cut, *, frames: bool
) -> list[RecordedEpisode]:
    found = episodes_of(one.path, read_input(one, config).recording, config, cut).episodes
    return found if frames else [each._replace(frames={}) for each in found]


def _key(one: DataInput, config: PipelineConfig, cut: Cut, *, wanted: bool) -> str:
    """Name of the file: another recording, configuration or cut has another."""
    described: tuple[Any, ...] = (FORM, str(one.path.resolve()), one.episode)
    described += (fingerprint(one.path), cut, *([FRAMES] if wanted else []))
    return hashlib.sha256(f"{described}{as_toml(config)}".encode()).hexdigest()[:32]


def _write(
    file: Path, episodes: Sequence[RecordedEpisode], one: DataInput, config: PipelineConfig
) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    frames: dict[str, tuple[RecordedFrames, NDArray[np.int64]]] = {}
    for number, episode in enumerate(episodes):
        arrays[f"{number}/{ENDS}"] = episode.ends_ns
        for stream, column in episode.columns.items():
            for name, array in column._asdict().items():
                arrays[f"{number}/{stream}/{name}"] = array
        for camera in config.cameras:
            if camera.name in episode.frames:
                numbers = shown_frames(camera, episode)
                arrays[f"{number}/{camera.name}/{SHOWN}"] = numbers
                frames[f"{number}/{camera.name}/{FRAMES}"] = episode.frames[camera.name], numbers
    scratch = scratch_of(file)
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    for name, (found, numbers) in frames.items():
        shapes[name] = np.dtype(np.uint8), (len(numbers), *found.size, CHANNELS)
    try:
        for name, tensor in create(scratch, shapes, {"input": one.name}).items():
            if name in frames:
                copy_frames(*frames[name], tensor)
            else:
                tensor[...] = arrays[name]
            if isinstance(tensor, np.memmap):
                tensor.flush()
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)


def _open(file: Path, config: PipelineConfig) -> list[RecordedEpisode]:
    arrays, _ = open_mapped(file)
    count = sum(1 for name in arrays if name.endswith(f"/{ENDS}"))
    return [
        RecordedEpisode(
            arrays[f"{number}/{ENDS}"],
            {
                stream.name: SampleColumn(
                    *(arrays[f"{number}/{stream.name}/{name}"] for name in SampleColumn._fields)
                )
                for stream in config.streams
            },
            {
                camera.name: _frames(file, f"{number}/{camera.name}/", camera, arrays)
                for camera in config.cameras
                if f"{number}/{camera.name}/{FRAMES}" in arrays
            },
        )
        for number in range(count)
    ]


def _frames(
    file: Path, place: str, camera: StreamConfig, arrays: Mapping[str, NDArray[Any]]
) -> RecordedFrames:
    assert camera.image is not None
    count = int(arrays[place + SHOWN].max(initial=-1)) + 1
    read = _MappedFrames(file, place + FRAMES, place + SHOWN)
    return RecordedFrames(count, (camera.image.height, camera.image.width), read)
