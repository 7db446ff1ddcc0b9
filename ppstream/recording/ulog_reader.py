"""Reads PX4 ULog through ``pyulog``: stamps in nanoseconds since boot, gaps where it dropped."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.recording.recording import Recording, Track

if TYPE_CHECKING:
    from ppstream.config.schema import StreamConfig

logger = logging.getLogger("ppstream")

NS_PER_US: Final = 1000
TOPIC: Final = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<instance>\d+)\])?\Z")


def load_ulog(path: Path, streams: Sequence[StreamConfig]) -> Recording:
    """The declared streams of a ``.ulg`` file: ``sensor_combined``, ``sensor_combined[1]`` ...

    A field is a column as PX4 names it, ``gyro_rad[0]``, or an array, ``gyro_rad``.

    Raises:
        ConfigError: ``pyulog`` is not installed, or the log lacks what is asked for.
    """
    try:
        from pyulog import ULog
    except ModuleNotFoundError as error:
        raise ConfigError(
            ["ULog needs a package that is not installed: pip install 'ppstream[replay]'"]
        ) from error
    with path.open("rb") as file:
        log = ULog(file)
    if log.file_corruption:
        logger.warning("%s is damaged: only its intact part is read", path)
    topics = {(topic.name, topic.multi_id): topic.data for topic in log.data_list}
    problems: list[str] = []
    tracks = {s.name: track for s in streams if (track := _track(path, s, topics, problems))}
    if problems:
        raise ConfigError(problems)
    return Recording(tracks)


def _track(
    path: Path, stream: StreamConfig, topics: dict[tuple[str, int], Any], problems: list[str]
) -> Track | None:
    if stream.image is not None:
        problems.append(f"streams: {stream.name!r} is a camera, and a ULog has no frames")
        return None
    recorded = stream.recorded
    match = TOPIC.match(recorded.topic) if recorded is not None else None
    if recorded is None or match is None:
        problems.append(
            f"streams: {stream.name!r} does not say where {path} has it; give it "
            'recorded = { topic = "sensor_combined", fields = ["gyro_rad"] }'
        )
        return None
    columns = topics.get((match["name"], int(match["instance"] or 0)))
    if columns is None:
        there = ", ".join(sorted({name for name, _ in topics}))
        problems.append(f"{path}: no topic {recorded.topic!r}, want one of {there}")
        return None
    wanted = [column for field in recorded.fields for column in _columns(field, columns)]
    stamp = recorded.stamp or "timestamp"
    missing = [f for f in (*recorded.fields, stamp) if not _columns(f, columns)]
    if missing:
        there = ", ".join(columns)
        problems.append(f"{path}: {recorded.topic} has no {', '.join(missing)}; it has {there}")
        return None
    values = np.stack([columns[name].astype(np.float64) for name in wanted], axis=1)
    return Track(columns[stamp].astype(np.int64) * NS_PER_US, values)


def _columns(field: str, columns: dict[str, Any]) -> list[str]:
    """The column of a field, or all of an array's, in order."""
    if field in columns:
        return [field]
    return [name for name in columns if name.startswith(f"{field}[")]
