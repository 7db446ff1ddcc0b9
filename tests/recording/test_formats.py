"""One contract for every format that is read: the same samples in, the same samples out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import recording_files as files
from stream_cases import stream

from ppstream.config.schema import RecordedAs, StreamConfig
from ppstream.recording.load import load_recording

FIELDS = ("angular_velocity.x", "angular_velocity.y", "angular_velocity.z")
PLAIN = stream("imu", dim=3, rate_hz=100)


def mapped(*fields: str) -> StreamConfig:
    return stream("imu", dim=3, rate_hz=100, recorded=RecordedAs(topic="/imu", fields=fields))


Write = Callable[[Path, files.Samples], Path]
FORMATS: dict[str, tuple[Write, StreamConfig, bool]] = {  # the last: tells when samples came
    "npz": (files.write_npz, PLAIN, False),
    "npz, compressed": (files.write_compressed, PLAIN, False),
    "own MCAP": (files.write_own, PLAIN, False),  # by rank 0's clock, from when it was recorded
    "JSON in MCAP": (files.write_json, mapped("joints"), True),
    "ROS 2 bag, SQLite": (files.write_sqlite, mapped(*FIELDS), True),
    "ROS 2 bag, MCAP": (files.write_mcap_bag, mapped(*FIELDS), True),
    "ROS 2 MCAP alone": (files.write_mcap_alone, mapped(*FIELDS), True),
    "ROS 1 bag": (files.write_ros1, mapped(*FIELDS), True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_written_is_read_in_order_with_its_repeats_and_delays(
    name: str, tmp_path: Path
) -> None:
    write, wanted, tells_arrivals = FORMATS[name]
    samples = files.Samples.drawn()
    recording = load_recording(write(tmp_path, samples), [wanted])
    track = recording.select([wanted]).tracks["imu"]
    assert track.stamps_ns.tolist() == samples.stamps_ns.tolist()
    assert track.values.dtype == np.float32
    assert track.values.tobytes() == samples.values.tobytes()
    if tells_arrivals:
        assert track.arrivals_ns is not None
        assert track.arrivals_ns.tolist() == samples.arrivals_ns.tolist()
    assert (np.diff(track.due_ns) >= 0).all()
    assert (track.due_ns >= track.stamps_ns).all()
    assert recording.select([wanted]).first_ns <= track.due_ns[0]
