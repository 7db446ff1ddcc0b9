"""What is recorded of a run, and where recordings have streams. Part of ``schema.py``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ppstream.config.field_types import FilePath, Name, Positive, Text


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Samples, windows' headers, action chunks and faults of a run, as MCAP."""

    file: FilePath | None = None  # .mcap, or a named pipe that a viewer reads; none: no recording
    queue_mb: Positive = 64.0  # waiting for the disk; what comes on top is dropped and counted
    robot: Name | None = None  # whose samples are replayed of a recording with several robots


class RecordedAs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a PX4 ULog, a ROS bag or an MCAP file made by others has a stream's samples."""

    topic: Text  # of a ULog: sensor_combined, or sensor_combined[1] for its second instance
    fields: Annotated[tuple[Text, ...], Meta(min_length=1)]  # pose.position.x, gyro_rad[0], or q:
    # all values of an array, in order
    stamp: Text | None = None  # of each message; none: header.stamp, else when it was logged
