"""Episodes of many recordings, decoded once: in memory, or in files that are mapped.

A file holds the columns of one input's episodes. Mapped, any number of workers share the pages of
what they read, and a data set may be larger than the memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.config.to_toml import as_toml
from ppstream.data.episode import Cut, Episode, SampleColumn, episodes_of
from ppstream.data.inputs import DataInput, read_input
from ppstream.data.job import fingerprint
from ppstream.data.safetensors_file import create, open_mapped

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import PipelineConfig

FORM: Final = "1"  # of a file; another one is made again
ENDS: Final = "ends_ns"


def load_columns(
    inputs: Sequence[DataInput], config: PipelineConfig, cut: Cut, cache: Path | None
) -> Iterator[list[Episode]]:
    """Each input's episodes, in turn.

    Args:
        inputs: see ``inputs.py``.
        config: streams and window.
        cut: which windows there are.
        cache: folder of the files, made if need be; None keeps everything in memory.

    Raises:
        ConfigError: an input cannot be read, is damaged, or has no window.
    """
    for one in inputs:
        if cache is None:
            yield _read(one, config, cut)
            continue
        file = cache / f"{_key(one, config, cut)}.safetensors"
        if not file.exists():
            cache.mkdir(parents=True, exist_ok=True)
            _write(file, _read(one, config, cut), one)
        yield _open(file, config)


def _read(one: DataInput, config: PipelineConfig, cut: Cut) -> list[Episode]:
    return episodes_of(one.path, read_input(one, config).recording, config, cut).episodes


def _key(one: DataInput, config: PipelineConfig, cut: Cut) -> str:
    """Name of the file: another recording, configuration or cut has another."""
    described = (FORM, str(one.path.resolve()), one.episode, fingerprint(one.path), cut)
    return hashlib.sha256(f"{described}{as_toml(config)}".encode()).hexdigest()[:32]


def _write(file: Path, episodes: Sequence[Episode], one: DataInput) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    for number, episode in enumerate(episodes):
        arrays[f"{number}/{ENDS}"] = episode.ends_ns
        for stream, column in episode.columns.items():
            for name, array in column._asdict().items():
                arrays[f"{number}/{stream}/{name}"] = array
    scratch = file.with_suffix(f".{os.getpid()}.tmp")
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    for name, tensor in create(scratch, shapes, {"input": one.name}).items():
        tensor[...] = arrays[name]
        if isinstance(tensor, np.memmap):
            tensor.flush()
    os.replace(scratch, file)


def _open(file: Path, config: PipelineConfig) -> list[Episode]:
    arrays, _ = open_mapped(file)
    count = sum(1 for name in arrays if name.endswith(f"/{ENDS}"))
    return [
        Episode(
            arrays[f"{number}/{ENDS}"],
            {
                stream.name: SampleColumn(
                    *(arrays[f"{number}/{stream.name}/{name}"] for name in SampleColumn._fields)
                )
                for stream in config.streams
            },
        )
        for number in range(count)
    ]
