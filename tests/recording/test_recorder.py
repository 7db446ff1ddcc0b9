"""A recorder that feeds a recording and a live view."""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("mcap")

from mcap.reader import make_reader
from robot_rig import MS, make_config, make_rows, wait_until

from ppstream.config.schema import ImageConfig, PipelineConfig, StreamConfig
from ppstream.core.clock import now_ns
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.recording.item_queue import ItemQueue
from ppstream.recording.items import EnvelopeItem, Item, LoggedLine
from ppstream.recording.load import load_recording
from ppstream.recording.mcap_writer import RecordFile
from ppstream.recording.recorder import Recorder


class Frozen:
    """A sink that takes nothing until it is told to, and then keeps what it gets."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.items: list[Item] = []

    def opened(self) -> Frozen:
        return self

    def write(self, items: Sequence[Item]) -> None:
        assert self.released.wait(20)
        self.items += items

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    sink = Frozen()
    yield sink
    sink.released.set()


def test_a_frozen_view_costs_the_recording_nothing_and_its_losses_are_told(
    tmp_path: Path, frozen: Frozen
) -> None:
    config = make_config()
    path = tmp_path / "run.mcap"
    recording = ItemQueue("recording", lambda: RecordFile(path, config, "run"), 10**6)
    view = ItemQueue("live view", frozen.opened, 2000)
    rows = make_rows(config)
    rows[0].open(1)
    recorder = Recorder(recording, view)
    recorder.tap(rows)
    ring = rows[0].rings["joints"]

    def arrive(first: int, count: int = 20) -> None:
        for number in range(first, first + count):
            ring.append(np.array([number + 1]) * MS, np.full((1, 3), 0.5, "f4"), now_ns())

    assert recorder.losses() == []
    arrive(0)
    (told,) = recorder.losses()
    assert (told["to"], told["failure"]) == ("live view", "")
    assert told["dropped"] > 0
    arrive(20)
    assert recorder.losses() == []  # it drops on, and that is known
    frozen.released.set()
    wait_until(lambda: view.statistics().waiting == 0)
    (ceased,) = recorder.losses()
    assert ceased["dropped"] >= told["dropped"]
    arrive(40, 1)
    first, second = recorder.close()
    assert (first["to"], first["written"], first["dropped"]) == ("recording", 41, 0)
    assert (second["written"] + second["dropped"], second["dropped"]) == (41, ceased["dropped"])
    assert second["written"] == len(frozen.items)
    assert load_recording(path).tracks["joints"].stamps_ns.tolist() == [
        number * MS for number in range(1, 42)
    ]


@pytest.mark.parametrize(("size", "shown"), [((4, 6), (4, 6)), ((480, 640), (240, 320))])
def test_a_view_gets_five_frames_a_second_of_320_pixels_at_most(
    size: tuple[int, int], shown: tuple[int, int], frozen: Frozen, tmp_path: Path
) -> None:
    config = with_camera(make_config(), *size)
    recording, view = Frozen(), frozen
    for sink in (recording, view):
        sink.released.set()
    queues = [ItemQueue("one", sink.opened, 10**8) for sink in (recording, view)]
    recorder = Recorder(*queues)
    rows = make_rows(config)
    rows[0].open(1)
    recorder.tap(rows)
    pixels = np.arange(size[0] * size[1] * 3, dtype=np.int64).astype(np.uint8)
    for number in range(11, 21):  # every 100 ms
        at_ns = number * 100 * MS
        rows[0].rings["wrist"].append(np.array([at_ns]), pixels[None], at_ns)
    recorder.close()
    assert recording.items == []  # frames are not recorded
    stamps = [item.stamp_ns for item in view.items]
    assert stamps == [number * 100 * MS for number in (11, 13, 15, 17, 19)]
    file = RecordFile(tmp_path / "view.mcap", config, "run")
    file.write(view.items)
    file.close()
    with (tmp_path / "view.mcap").open("rb") as written:
        *_, (_, _, message) = make_reader(written).iter_messages(topics=["/row0/cameras/wrist"])
    image = json.loads(message.data)
    assert (image["height"], image["width"], image["encoding"]) == (*shown, "rgb8")
    step = size[1] // shown[1]
    wanted = pixels.reshape(*size, 3)[::step, ::step]
    assert b64decode(image["data"]) == wanted.tobytes()
    assert (image["step"], image["timestamp"]) == (3 * shown[1], {"sec": 1, "nsec": 900 * MS})


def test_a_view_gets_the_ages_of_a_hundred_envelopes_a_second_and_every_drop(
    frozen: Frozen,
) -> None:
    frozen.released.set()
    recorder = Recorder(None, ItemQueue("live view", frozen.opened, 10**6))
    for number in range(1, 101):  # every ms
        at_ns = number * MS
        fields = {"kind": "envelope", "phase": "ready", "epoch": 1, "seq": number}
        if number % 2:
            recorder.record(EnvelopeRecord(**fields, tEmit=at_ns, age_rank0_ns=number))
        else:
            recorder.record(EnvelopeRecord(**fields, tDecode=at_ns, drop="expired"))
    recorder.close()
    drops = [item for item in frozen.items if isinstance(item, LoggedLine)]
    assert [item.fields["seq"] for item in drops] == [*range(2, 101, 2)]
    ages = [item.at_ns for item in frozen.items if isinstance(item, EnvelopeItem)]
    assert ages == [number * MS for number in range(10, 101, 10)]


def with_camera(config: PipelineConfig, height: int, width: int) -> PipelineConfig:
    camera = StreamConfig(name="wrist", rate_hz=30, image=ImageConfig(height=height, width=width))
    return msgspec.structs.replace(config, streams=(*config.streams, camera))
