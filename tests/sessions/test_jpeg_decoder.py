from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from PIL import Image
from robot_rig import ACTIONS, make_client, make_config, serving, wait_until
from session_desk import STREAMS, Desk, hello, open_desk
from stream_cases import held

from ppstream.config.schema import ImageConfig, PipelineConfig, StreamConfig
from ppstream.core.clock import now_ns
from ppstream.sessions import jpeg_decoder
from ppstream.wire import robot_messages as m
from ppstream.wire.jpeg import SCANS_MAX, decode

HEIGHT, WIDTH = 16, 24
DIM = HEIGHT * WIDTH * 3
IMAGE = ImageConfig(height=HEIGHT, width=WIDTH)
CAMERA = m.StreamDeclaration("front", DIM, "uint8", "jpeg")


def jpeg(
    level: int = 100,
    *,
    mode: str = "RGB",
    size: tuple[int, int] = (WIDTH, HEIGHT),
    progressive: bool = False,
) -> bytes:
    """A frame of one grey, which JPEG keeps to within a few levels."""
    file = io.BytesIO()
    color = level if mode == "L" else (level,) * len(mode)
    Image.new(mode, size, color).save(file, "JPEG", quality=95, progressive=progressive)
    return file.getvalue()


def jpeg_of_scans(count: int) -> bytes:
    """A progressive frame whose last scan is repeated until it has so many."""
    usual = jpeg(progressive=True)
    scan = usual[usual.rindex(b"\xff\xda") : -2]
    return usual[:-2] + scan * (count - usual.count(b"\xff\xda")) + usual[-2:]


def camera_config() -> PipelineConfig:
    config = make_config()
    camera = StreamConfig(name="front", rate_hz=30.0, image=IMAGE)
    return msgspec.structs.replace(config, streams=(*config.streams, camera))


@pytest.fixture
def desk() -> Iterator[Desk]:
    with open_desk(config=camera_config()) as desk:
        yield desk


def frame(session: int, stamp_ns: int, data: bytes) -> m.Samples:
    stamp = stamp_ns.to_bytes(8, "little", signed=True)
    return m.Samples(session, 2, memoryview(stamp), memoryview(data))


def drain_until(desk: Desk, count: int) -> None:
    """Until so many frames were decoded, or refused as no frame."""
    ledger = desk.rows[0].rings["front"].ledger

    def is_done() -> bool:
        desk.sessions.drain(desk.now_ns)
        return desk.sessions.statistics().images_decoded + ledger.dropped.get("jpeg", 0) >= count

    wait_until(is_done)


def hold_decoding(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first event tells that a decoder has begun; it goes on once the second is set."""
    began, may_decode = threading.Event(), threading.Event()

    def slowly(data: bytes, height: int, width: int) -> np.ndarray | None:
        began.set()
        assert may_decode.wait(60)
        return decode(data, height, width)

    monkeypatch.setattr(jpeg_decoder, "decode", slowly)
    return began, may_decode


def test_a_jpeg_becomes_the_sample_of_its_stamp_and_arrival(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot, streams=(*STREAMS, CAMERA)).session
    arrived_ns = desk.now_ns
    desk.send(robot, frame(session, 7, jpeg(100)))
    desk.now_ns += 1_000_000
    drain_until(desk, 1)
    ring = desk.rows[0].rings["front"]
    assert (ring.count, ring.newest_ns) == (1, 7)
    assert ring.newest_rx_ns == arrived_ns  # so that the time of decoding counts in the age
    assert np.abs(np.array(held(ring)[1]) - 100).max() <= 3
    assert desk.sessions.statistics().image_decode_ns > 0


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"no jpeg at all", id="noise"),
        pytest.param(jpeg()[:-200], id="cut short"),
        pytest.param(jpeg(size=(WIDTH + 1, HEIGHT)), id="another width"),
        pytest.param(jpeg(size=(HEIGHT, WIDTH)), id="turned"),
        pytest.param(b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff" + b"\0" * 64, id="4 Gpixel"),
    ],
)
def test_what_is_no_such_frame_is_counted_and_the_next_one_used(desk: Desk, data: bytes) -> None:
    robot = desk.robot()
    session = desk.admit(robot, streams=(*STREAMS, CAMERA)).session
    desk.send(robot, frame(session, 7, data))
    drain_until(desk, 1)
    ring = desk.rows[0].rings["front"]
    assert (ring.count, ring.ledger.dropped) == (0, {"jpeg": 1})
    desk.send(robot, frame(session, 8, jpeg()))
    drain_until(desk, 2)
    assert ring.newest_ns == 8


@pytest.mark.parametrize("stamps", [b"", b"\0" * 7, b"\0" * 16])
def test_an_encoded_message_holds_one_frame(desk: Desk, stamps: bytes) -> None:
    robot = desk.robot()
    session = desk.admit(robot, streams=(*STREAMS, CAMERA)).session
    desk.send(robot, m.Samples(session, 2, memoryview(stamps), memoryview(jpeg())))
    assert desk.rows[0].rings["front"].ledger.dropped == {"shape": 1}


def test_a_grey_camera_is_taken_as_color() -> None:
    pixels = decode(jpeg(50, mode="L"), HEIGHT, WIDTH)
    assert pixels is not None
    assert pixels.shape == (1, DIM)


@pytest.mark.parametrize("count", [10, SCANS_MAX])
def test_a_progressive_frame_of_usual_scans_is_decoded(count: int) -> None:
    pixels = decode(jpeg_of_scans(count), HEIGHT, WIDTH)
    assert pixels is not None
    assert np.abs(pixels.astype(int) - 100).max() <= 3


def test_a_frame_of_too_many_scans_is_none() -> None:
    """Each scan costs a turn through all pixels: a small file could keep a thread for seconds."""
    assert decode(jpeg_of_scans(SCANS_MAX + 1), HEIGHT, WIDTH) is None


def test_of_frames_that_wait_the_newest_counts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_decode = hold_decoding(monkeypatch)
    robot = desk.robot()
    session = desk.admit(robot, streams=(*STREAMS, CAMERA)).session
    desk.send(robot, frame(session, 1, jpeg()))
    assert began.wait(60)
    desk.send(robot, *[frame(session, stamp, jpeg()) for stamp in (2, 3, 4)])  # the loop goes on
    may_decode.set()
    drain_until(desk, 2)
    ring = desk.rows[0].rings["front"]
    assert (ring.count, ring.newest_ns, ring.ledger.dropped) == (2, 4, {"superseded": 2})


@pytest.mark.parametrize("ends", [m.ResetRequest, m.Bye])
def test_a_frame_from_before_a_reset_or_goodbye_reaches_no_ring(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, ends: type[m.ResetRequest | m.Bye]
) -> None:
    _, may_decode = hold_decoding(monkeypatch)
    robot = desk.robot()
    session = desk.admit(robot, streams=(*STREAMS, CAMERA)).session
    desk.send(robot, frame(session, 1, jpeg()), ends(session))
    may_decode.set()
    drain_until(desk, 1)
    ring = desk.rows[0].rings["front"]
    assert (ring.count, ring.ledger.dropped) == (0, {"closed": 1})


def test_without_a_decoder_the_robot_is_told_what_to_install(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    robot = desk.robot()
    desk.send(robot, hello(streams=(*STREAMS, CAMERA)))
    answer = desk.receive(robot)
    assert answer.reason == "contract"
    assert "pip install 'ppstream[camera]'" in answer.details[0]


def test_a_robot_client_sends_jpeg() -> None:
    streams = (("joints", 3), ("imu", 2, "float64"), ("front", DIM, "uint8", "jpeg"))
    with (
        serving(camera_config()) as server,
        make_client(server.sessions.endpoint, streams=streams, actions=ACTIONS) as client,
    ):
        client.connect(10)
        assert client.push_jpeg("front", now_ns(), jpeg())
        wait_until(lambda: server.rows[0].rings["front"].count == 1)
