"""Data sets made by ``ppstream resample`` of small recordings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from forked_process import ForkedProcess
from stream_cases import at_ms, config, stream

from ppstream.config.load import as_toml
from ppstream.config.schema import PipelineConfig

LIMIT_S = 100


def settings(**more: Any) -> PipelineConfig:
    """A 200 Hz arm and a 50 Hz gripper in groups of their own, windows of 4 targets at 100 Hz."""
    arm = stream("arm", dim=3, rate_hz=200)
    return config(arm, stream("gripper", dim=1, rate_hz=50, group="action"), steps=4, **more)


def write_recording(path: Path, number: int, seconds: float = 0.5) -> Path:
    """A recording like no other number's."""
    rng = np.random.default_rng(number)
    arrays = {}
    for name, period_ms, dim in (("arm", 5, 3), ("gripper", 20, 1)):
        times = np.arange(0, 1000 * seconds, period_ms)
        stamps = at_ms(*(1000 * number + times + rng.uniform(0, period_ms / 2, len(times))))
        arrays[f"{name}.stamps_ns"] = stamps
        arrays[f"{name}.values"] = rng.normal(number, 1, (len(stamps), dim)).astype(np.float32)
    np.savez(path, allow_pickle=False, **arrays)
    return path


def write_config(folder: Path, run: PipelineConfig) -> Path:
    file = folder / "run.toml"
    file.write_text(as_toml(run))
    return file


def started(
    run: Path, out: Path, *words: str | Path, own_session: bool = False, **environment: str
) -> ForkedProcess:
    """The command in a process of its own; its errors are in ``out.errors``."""
    command = ["ppstream.data.cli", *_arguments(run, out, *words)]
    said = out.with_suffix(".errors")
    return ForkedProcess(command, os.environ | environment, said, own_session=own_session)


def _arguments(run: Path, out: Path, *words: str | Path) -> list[str]:
    return ["--config", str(run), "--out", str(out), "--jobs", "1", *map(str, words)]


def make(run: Path, out: Path, *words: str | Path) -> int:
    """The exit code of the command, in this process."""
    from ppstream.data.cli import main

    return main(_arguments(run, out, *words))


def frames_in(out: Path) -> dict[str, list[Any]]:
    """All columns of a LeRobot folder."""
    import pyarrow.parquet as pq

    files = sorted((out / "data").glob("*/*.parquet"))
    tables = [pq.read_table(file, partitioning=None).to_pydict() for file in files]
    return {name: [row for one in tables for row in one[name]] for name in tables[0]}
