"""Frames of ``dataset.py``: a camera in MCAP, into files of windows and into batches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from bench.dataset_rounds import Settings, Taken, Way, rounds_of

FRAMES: Final = 1_000
FEWEST: Final = 128  # without a GPU
PICTURES: Final = 16  # that take turns
PERIOD_NS: Final = 20_000_000
SIDE: Final = 224  # of what a policy reads
BATCH: Final = 32  # windows, each with a frame of its own
CACHED: Final = "Windows, cached"
DECODED: Final = "decoded before, when the cache was made"
SECOND_NS: Final = 1_000_000_000
KINDS: Final = {"jpeg": "sensor_msgs/msg/CompressedImage", "raw": "sensor_msgs/msg/Image"}

_CONFIG: Final = """
name = "bench"
window = {{ steps = 1, dt_ms = 20 }}
actions = {{ names = ["a"], horizon = 4, dt_ms = 10, low = [-1], high = [1], lease_ms = 100 }}
policy = {{ target = "nobody:build" }}

[[streams]]
name = "top"
rate_hz = 50
recorded = {{ topic = "/top" }}
image = {{ height = {height}, width = {width}, resize = [{side}, {side}], dtype = "float32" }}
"""


class _Frames(NamedTuple):
    """A camera's frames."""

    height: int
    width: int
    form: str

    def __str__(self) -> str:
        return f"{self.width} x {self.height} {self.form}"


CASES: Final = tuple(_Frames(*size, form) for size in ((SIDE, SIDE), (480, 640)) for form in KINDS)


def measure(_: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    """Each way's note has the share of its time that the decoder alone takes."""
    count = settings.scaled(FRAMES, FEWEST)
    for case in CASES:
        folder = Path(settings.folder) / str(case)
        folder.mkdir()
        file = folder / "run.mcap"
        images = _images(case)
        _write(file, case, images, count)
        ways = _ways(file, case, [images[n % PICTURES] for n in range(count)], device)
        alone, *others = rounds_of(case, ways, settings, gate)
        yield alone
        for one in others:
            share = statistics.median(alone.seconds) / statistics.median(one.seconds)
            note = f"{alone.way}: {share:.0%} of its time"
            yield one._replace(note=DECODED if one.way == CACHED else note)


def _ways(file: Path, case: _Frames, images: list[bytes], device: torch.device) -> dict[str, Way]:
    from ppstream.config.load import read
    from ppstream.data import Windows
    from ppstream.data.inputs import DataInput
    from ppstream.data.job import make_part
    from ppstream.data.outputs import DataSettings

    described = file.with_suffix(".toml")
    described.write_text(_CONFIG.format(height=case.height, width=case.width, side=SIDE))
    config = read(str(described))
    wanted = DataSettings(config, "safetensors", "windows")
    state = file.parent / "state"
    state.mkdir()

    def resample() -> None:
        made = make_part(state, 0, DataInput(file), wanted)
        assert not made.error, made.error

    def epoch(windows: Any) -> None:
        have = 0
        for batch in windows.batches(device):
            have += len(batch["top.frames"])
        assert have == len(images), f"{have} windows of {len(images)} frames"

    size, count = file.stat().st_size, len(images)
    plain = "Pillow" if case.form == "jpeg" else "a copy"
    read_anew = Windows(file, config, BATCH)
    cached = Windows(file, config, BATCH, cache=file.parent / "cache")
    return {
        f"{plain} alone": Way(lambda: _decode(case, images), count, size),
        "into safetensors": Way(resample, count, size),
        "Windows": Way(lambda: epoch(read_anew), count, size),
        CACHED: Way(lambda: epoch(cached), count, size),
    }


def _decode(case: _Frames, images: list[bytes]) -> None:
    from PIL import Image

    for data in images:
        if case.form == "jpeg":
            np.asarray(Image.open(BytesIO(data)).convert("RGB"))
        else:
            np.frombuffer(data, np.uint8).copy()


def _images(case: _Frames) -> list[bytes]:
    """Pictures as cameras give them: slopes, waves, a sensor's noise."""
    from ppstream.wire import jpeg

    y, x = np.mgrid[: case.height, : case.width]
    found = []
    for number in range(PICTURES):
        waves = 30 * np.sin((x + number) / 5) * np.cos(y / 7)
        noise = np.random.default_rng(number).normal(0, 4, (*x.shape, 3))
        slopes = np.stack([x / case.width, y / case.height, (x * y) % 97 / 97], 2) * 255
        frame = np.clip(slopes + waves[..., None] + noise, 0, 255).astype(np.uint8)
        found.append(jpeg.encode(frame) if case.form == "jpeg" else frame.tobytes())
    return found


def _write(file: Path, case: _Frames, images: list[bytes], count: int) -> None:
    """Messages of ROS 2, in chunks as its recorder writes them."""
    from mcap.writer import Writer
    from rosbags.typesys import Stores, get_typestore

    kind = KINDS[case.form]
    store: Any = get_typestore(Stores.ROS2_HUMBLE)
    types = store.types
    with file.open("wb") as output:
        writer = Writer(output)
        writer.start()
        definition = store.generate_msgdef(kind, ros_version=2)[0].encode()
        schema = writer.register_schema(kind, "ros2msg", definition)
        channel = writer.register_channel("/top", "cdr", schema)
        for number in range(count):
            at_ns = (number + 1) * PERIOD_NS
            stamp = types["builtin_interfaces/msg/Time"](*divmod(at_ns, SECOND_NS))
            header = types["std_msgs/msg/Header"](stamp, "top")
            data = np.frombuffer(images[number % PICTURES], np.uint8)
            body: tuple[Any, ...] = ("jpeg", data)
            if case.form == "raw":
                body = (case.height, case.width, "rgb8", 0, 3 * case.width, data)
            message = bytes(store.serialize_cdr(types[kind](header, *body), kind))
            writer.add_message(channel, at_ns, message, at_ns)
        writer.finish()
