"""A recorder that feeds a recording and a live view."""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

pytest.importorskip("mcap")

from mcap.reader import make_reader
from recording_files import with_camera
from robot_rig import MS, make_chunk, make_config, make_rows, wait_until

from ppstream.core.clock import now_ns
from ppstream.ingest.rows import RowInput
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.recording.item_queue import ItemQueue
from ppstream.recording.items import (
    Cleared,
    EnvelopeItem,
    Item,
    LoggedLine,
    RowWindow,
    SamplesItem,
)
from ppstream.recording.load import load_recording
from ppstream.recording.mcap_writer import RecordFile, names_max
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


def test_a_queue_full_of_others_takes_a_reset_still(frozen: Frozen) -> None:
    """Samples that are lost leave a gap in their numbers; a reset would be missed by nobody."""
    queue = ItemQueue("recording", frozen.opened, 10**6, items_max=3)
    line = LoggedLine(1, {})
    for item in (line, line, line, line, Cleared("arm", 1, "reset", {}), line):
        queue.put(item)
    frozen.released.set()
    queue.close()
    assert [type(item) for item in frozen.items] == [LoggedLine, LoggedLine, LoggedLine, Cleared]


class OwnWindow(NamedTuple):
    """Of a row that is there."""

    present: bool = True
    episode: tuple[int, int] = (1, 0)
    window_end_ns: int = 5 * MS
    expires_ns: int = 50 * MS


def test_a_window_told_of_later_holds_what_had_come_and_none_of_a_row_emptied_since(
    frozen: Frozen,
) -> None:
    frozen.released.set()
    recorder = Recorder(ItemQueue("recording", frozen.opened, 10**6))
    rows = make_rows(make_config(rows=2))
    recorder.tap(rows)
    for session, row in enumerate(rows, 1):
        row.open(session)
        row.robot = f"arm{session}"

    def arrive(row: RowInput, *stamps: int) -> None:
        for stamp in stamps:
            row.rings["joints"].append(np.array([stamp]) * MS, np.zeros((1, 3), "f4"), now_ns())

    arrive(rows[0], 1, 2)
    arrive(rows[1], 1)
    marks = recorder.marks()
    arrive(rows[0], 3, 3)  # the second one is refused, and has come
    rows[1].new_episode()
    both = [OwnWindow(), OwnWindow()]
    recorder.windows(now_ns(), 1, 0, "ready", both, marks)
    recorder.windows(now_ns(), 1, 1, "ready", both)
    recorder.close()
    windows = [item for item in frozen.items if isinstance(item, RowWindow)]
    assert [(window.robot, window.seq, window.samples["joints"]) for window in windows] == [
        ("arm1", 0, 2),
        ("arm1", 1, 4),
        ("arm2", 1, 1),
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
    assert recording.items == []  # unless it is asked for
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


def test_a_recording_gets_every_frame_beside_a_view_that_is_frozen(frozen: Frozen) -> None:
    config = with_camera(make_config(), 4, 6)
    kept = Frozen()
    kept.released.set()
    queues = ItemQueue("recording", kept.opened, 10**6), ItemQueue("live view", frozen.opened, 600)
    recorder = Recorder(*queues, keeps_frames=True)
    rows = make_rows(config)
    rows[0].open(1)
    recorder.tap(rows)
    pixels = np.random.default_rng(1).integers(0, 256, (30, 72), np.uint8)
    for number in range(30):  # every 100 ms, the last ten in one message
        at_ns = (number + 2) * 100 * MS
        last = slice(number, number + 1) if number < 20 else slice(20, 30)
        if number <= 20:
            stamps = np.arange(last.start, last.stop) * MS
            rows[0].rings["wrist"].append(stamps, pixels[last], at_ns)
    frozen.released.set()
    recording, view = recorder.close()
    assert (recording["written"], recording["dropped"]) == (30, 0)
    assert [item.number for item in kept.items] == [*range(30)]
    assert [item.stamp_ns for item in kept.items] == [number * MS for number in range(30)]
    assert b"".join(item.pixels for item in kept.items) == pixels.tobytes()
    assert view["dropped"] > 0
    assert view["written"] + view["dropped"] == 11  # five a second, told to nobody else


def test_robots_behind_the_first_ones_are_recorded_by_their_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each topic has a channel, of which a file has a limited number: no name fills it."""
    config = with_camera(make_config(rows=2), 4, 6)
    paths = [tmp_path / name for name in ("run.mcap", "view.mcap")]
    files = [partial(RecordFile, path, config, "run") for path in paths]
    queues = [ItemQueue("recording", file, 10**8) for file in files]
    recorder = Recorder(*queues, names_max=4, keeps_frames=True)
    rows = make_rows(config)
    recorder.tap(rows)
    for number in range(9):
        row = rows[number % 2]
        row.open(number + 1)
        row.robot = f"arm-{number}"
        values = np.full((1, 3), float(number), "f4")
        row.rings["joints"].append(np.array([1]), values, now_ns())
        row.rings["wrist"].append(np.array([1]), np.zeros((1, 72), "u1"), now_ns())
        recorder.chunk(number % 2, make_chunk(), None)
        row.close()
    told = recorder.close()
    assert [one["failure"] for one in told] == ["", ""]
    named = [f"arm-{number}" for number in range(4)]
    for path in paths:
        with path.open("rb") as file:
            topics = {one.topic for one in make_reader(file).get_summary().channels.values()}
        robots = {one.split("/")[1] for one in topics}
        assert robots == {*named, "row0", "row1"}
    by_row = load_recording(paths[0], robot="row0").tracks["joints"]
    assert by_row.values[:, 0].tolist() == [4, 6, 8]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("4 robots were recorded by their names: arm-4 and others are by row")


@pytest.mark.parametrize(("streams", "names"), [(3, 1000), (256, 245)])
def test_the_topics_of_all_robots_fit_a_file(streams: int, names: int) -> None:
    config = make_config(rows=8)
    config = msgspec.structs.replace(config, streams=config.streams[:1] * streams)
    assert names_max(config) == names
    assert (names + 8) * (streams + 3) + 3 <= 0xFFFF


def test_frames_are_dropped_before_samples_are(frozen: Frozen) -> None:
    config = with_camera(make_config(), 4, 6)
    recorder = Recorder(ItemQueue("recording", frozen.opened, 20_000), keeps_frames=True)
    rows = make_rows(config)
    rows[0].open(1)
    recorder.tap(rows)
    for number in range(1, 151):  # 272 bytes each
        rows[0].rings["wrist"].append(np.array([number]) * MS, np.zeros((1, 72), "u1"), now_ns())
    before = recorder.losses()[0]["dropped"]
    assert 0 < before < 150
    for number in range(1, 6):  # 220 bytes each
        rows[0].rings["joints"].append(np.array([number]) * MS, np.zeros((1, 3), "f4"), now_ns())
    frozen.released.set()
    (told,) = recorder.close()
    assert told["dropped"] == before
    samples = [item for item in frozen.items if isinstance(item, SamplesItem)]
    assert [item.first for item in samples] == [*range(5)]


def test_a_reset_is_told_where_a_camera_ends_the_windows(frozen: Frozen) -> None:
    frozen.released.set()
    config = with_camera(make_config(), 4, 6)
    recorder = Recorder(ItemQueue("recording", frozen.opened, 4000))
    rows = make_rows(config, reference="wrist")
    rows[0].open(1)
    recorder.tap(rows)
    rows[0].new_episode()
    recorder.close()
    assert [item.reason for item in frozen.items if isinstance(item, Cleared)] == ["new_episode"]


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
