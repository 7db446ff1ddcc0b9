"""Images of other software: the RGB that is in them, or the reason why there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from camera_files import HEIGHT, WIDTH, opened, saved
from recording_files import picture

from ppstream.core.errors import ConfigError
from ppstream.recording.image_messages import found_image

FRAME = picture(HEIGHT, WIDTH)
ALPHA = np.full((HEIGHT, WIDTH, 1), 9, np.uint8)
GREY = FRAME[..., 1]


def raw(pixels: Any, encoding: str = "rgb8", *, step: int | None = None, **more: Any) -> Any:
    rows = np.asarray(pixels, np.uint8).reshape(HEIGHT, -1)
    fields = {"height": HEIGHT, "width": WIDTH, "encoding": encoding, "data": rows.reshape(-1)}
    return SimpleNamespace(**fields | {"step": step or rows.shape[1]} | more)


def compressed(data: bytes, form: str = "jpeg") -> dict[str, Any]:
    return {"format": form, "data": data}


@pytest.mark.parametrize(
    ("encoding", "data", "expected"),
    [
        ("rgb8", FRAME, FRAME),
        ("bgr8", FRAME[..., ::-1], FRAME),
        ("rgba8", np.concatenate([FRAME, ALPHA], 2), FRAME),
        ("bgra8", np.concatenate([FRAME[..., ::-1], ALPHA], 2), FRAME),
        ("mono8", GREY, np.stack([GREY] * 3, 2)),
    ],
)
@pytest.mark.parametrize("padding", [0, 5])
def test_raw_images_of_each_encoding_are_rgb(
    encoding: str, data: Any, expected: Any, padding: int
) -> None:
    rows = np.pad(data.reshape(HEIGHT, -1), ((0, 0), (0, padding)), constant_values=3)
    found = found_image("sensor_msgs/msg/Image", raw(rows, encoding))
    assert found.size == (HEIGHT, WIDTH)
    assert (found.pixels().dtype, found.pixels().shape) == (np.uint8, (HEIGHT * WIDTH * 3,))
    assert found.pixels().tobytes() == expected.tobytes()
    assert found.encoded() is None


@pytest.mark.parametrize(
    ("form", "said", "frame"),
    [
        ("JPEG", "jpeg", FRAME),
        ("JPEG", "bgr8; jpeg compressed bgr8", FRAME),
        ("PNG", "png", FRAME),
        ("PNG", "", FRAME),
        ("JPEG", "jpg", GREY),
        ("PNG", "rgba8; png compressed ", np.concatenate([FRAME, ALPHA], 2)),
    ],
)
def test_compressed_images_are_what_any_reader_sees(form: str, said: str, frame: Any) -> None:
    data = saved(frame, form)
    found = found_image("foxglove.CompressedImage", compressed(data, said))
    found.check()
    assert found.size == (HEIGHT, WIDTH)
    assert found.pixels().tobytes() == opened(data).tobytes()
    assert found.encoded() == (data if frame is FRAME else None), "as it is only where it is RGB"


def test_a_picture_that_readers_would_turn_is_no_encoded_one() -> None:
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 6
    data = saved(FRAME, exif=turned.tobytes())
    found = found_image("CompressedImage", compressed(data))
    assert found.pixels().tobytes() == opened(data).tobytes()
    assert found.encoded() is None


@pytest.mark.parametrize(
    ("kind", "message", "says"),
    [
        ("sensor_msgs/msg/Image", raw(FRAME, "bayer_rggb8"), "'bayer_rggb8', want rgb8, bgr8"),
        ("sensor_msgs/msg/Image", raw(FRAME, "16UC1"), "'16UC1', want rgb8"),
        ("x/CompressedImage", compressed(b"", "h264"), "'h264', want jpeg or png"),
        ("x/CompressedImage", compressed(b"", "16UC1; compressedDepth png"), "want jpeg or png"),
        (
            "x/CompressedImage",
            compressed(saved(GREY.astype(np.uint16), "PNG"), "mono16; png compressed"),
            "PNG of I;16, want 8 bits",
        ),
        ("foxglove.CompressedVideo", {}, "'foxglove.CompressedVideo' are not read as frames"),
    ],
)
def test_an_encoding_that_is_not_known_is_an_error_of_the_configuration(
    kind: str, message: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        found_image(kind, message)


JPEG, PNG = saved(FRAME), saved(FRAME, "PNG")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (raw(FRAME, data=FRAME.reshape(-1)[:-1]), "719 bytes of rgb8 in rows of 60, want 12 rows"),
        (raw(FRAME, step=WIDTH * 3 - 1), "720 bytes of rgb8 in rows of 59"),
        (raw(FRAME, height=0), "720 bytes of rgb8"),
        (SimpleNamespace(encoding="rgb8"), "no field 'height'"),
    ],
)
def test_a_raw_image_of_too_few_bytes_is_damaged(message: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        found_image("Image", message)


@pytest.mark.parametrize(
    "data", [b"", b"no picture", JPEG[:200], JPEG[: len(JPEG) * 2 // 3], PNG[:90], PNG[:-60]]
)
def test_a_picture_that_is_cut_short_is_damaged(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no JPEG or PNG|does not decode"):
        found_image("CompressedImage", compressed(data)).check()
