from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.config import load
from ppstream.config.schema import ImageConfig
from ppstream.core.errors import ConfigError
from ppstream.core.specs import TensorSpec
from ppstream.ingest.rows import NOTHING_NEEDED, Need
from ppstream.ingest.synthetic import SyntheticSource

torch.set_num_threads(1)

LEASE = 100 * MS
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = ImageConfig(height=4, width=6, frames=2, mean=MEAN, std=STD, dtype="float32")


def rig(
    image: ImageConfig = PLAIN,
    rows: int = 1,
    needs: Mapping[str, Need] = NOTHING_NEEDED,
    **more: Any,
) -> Input:
    case = Input(
        config(
            stream("q", dim=1, reference=True),
            stream("front", dim=0, rate_hz=30, image=image, **more),
            rows=rows,
        ),
        needs=needs,
    )
    for row, place in enumerate(case.rows):
        place.open(row + 1)
    return case


def push(case: Input, *times: float, row: int = 0) -> NDArray[np.uint8]:
    ring = case.rows[row].rings["front"]
    frames = np.random.default_rng(len(times)).integers(0, 256, (len(times), ring.stream.dim))
    pixels = frames.astype(np.uint8)
    assert ring.append(at_ms(*times), pixels, 0) == len(times)
    return pixels


def push_q(case: Input, until_ms: int, row: int = 0) -> None:
    stamps = at_ms(*range(until_ms + 1))
    case.rows[row].rings["q"].append(stamps, ramp(stamps, 1), 0)


def normalised(pixels: NDArray[np.uint8], image: ImageConfig) -> NDArray[np.float64]:
    """Channels first, in float64, from the definition."""
    frames = pixels.reshape(-1, image.height, image.width, 3).transpose(0, 3, 1, 2) / 255
    mean, std = (np.array(values)[:, None, None] for values in (image.mean, image.std))
    return (frames - mean) / std


def test_a_needed_camera_has_all_its_frames_in_the_window_or_there_is_none() -> None:
    case = rig(needs={"front": Need(100 * MS, PLAIN.frames)})
    (row,), out = case.rows, case.slot()

    def at(ms: int) -> None:
        row.rings["q"].append(at_ms(ms), ramp(at_ms(ms), 1), 0)

    at(10)
    push(case, 5)
    assert not row.present  # of two frames one
    push(case, 12)
    assert not row.present  # that one is behind the window's end
    assert not case.cutter.cut(out, [None], LEASE).window_end_ns[0]
    at(12)
    assert row.present
    case.cutter.cut(out, [None], LEASE)
    assert out["front.valid"].all()
    at(112)
    assert row.present
    at(113)
    assert not row.present
    push(case, 114)  # it is back, behind the window's end
    assert not row.present
    assert row.lacks("front")
    at(114)
    assert row.present
    row.new_episode()
    at(115)
    assert not row.present


def test_a_camera_is_a_stream_whose_dim_follows_from_its_image() -> None:
    case = rig()
    camera = case.config.cameras[0]
    assert (camera.dim, camera.dtype) == (4 * 6 * 3, "uint8")
    assert list(case.config.groups) == ["state"]
    assert case.cutter.inputs[3:6] == (
        TensorSpec("front.frames", (2, 3, 4, 6), "float32"),
        TensorSpec("front.valid", (2,), "bool"),
        TensorSpec("front.age_s", (2,), "float32"),
    )


def test_the_newest_frames_not_after_the_end_come_oldest_first() -> None:
    case = rig()
    push_q(case, 100)
    pixels = push(case, 10, 40, 73, 120)  # the last is newer than the window's end
    out = case.slot()
    info = case.cutter.cut(out, [None], LEASE)
    np.testing.assert_allclose(out["front.frames"][0], normalised(pixels[1:3], PLAIN), atol=1e-5)
    np.testing.assert_allclose(out["front.age_s"][0], [0.06, 0.027], atol=1e-7)
    assert out["front.valid"].tolist() == [[True, True]]
    assert info.input_age_ns == {"q": 0, "front": 27 * MS}
    case.check()


def test_a_missing_frame_is_zeros_and_an_old_one_invalid() -> None:
    case = rig(max_age_ms=40.0)
    push_q(case, 100)
    pixels = push(case, 50)
    out = case.slot()
    case.cutter.cut(out, [None], LEASE)
    assert not out["front.frames"][0, 0].any()
    np.testing.assert_allclose(out["front.frames"][0, 1:], normalised(pixels, PLAIN), atol=1e-5)
    assert out["front.valid"].tolist() == [[False, False]]
    np.testing.assert_allclose(out["front.age_s"][0], [0, 0.05], atol=1e-7)


def test_an_absent_row_has_no_frames_whatever_its_camera_sent() -> None:
    case = rig(rows=2)
    push_q(case, 30, row=1)
    push(case, 5)
    push(case, 5, 9, row=1)
    out = case.slot()
    case.cutter.cut(out, [None, None], LEASE)
    assert not out["front.frames"][0].any()
    assert out["front.valid"].tolist() == [[False, False], [True, True]]


def test_frames_survive_the_ring_going_round() -> None:
    case = rig()
    capacity = case.banks["front"].capacity
    push_q(case, 10)
    for turn in range(2 * capacity + 3):
        pixels = push(case, turn * 10)
    push_q_to = (2 * capacity + 3) * 10
    stamps = at_ms(*range(11, push_q_to))
    case.rows[0].rings["q"].append(stamps, ramp(stamps, 1), 0)
    out = case.slot()
    case.cutter.cut(out, [None], LEASE)
    np.testing.assert_allclose(out["front.frames"][0, 1:], normalised(pixels, PLAIN), atol=1e-5)


def test_resizing_is_bilinear_between_pixel_centres() -> None:
    image = ImageConfig(height=2, width=2, resize=(4, 4), dtype="float32")
    case = rig(image)
    push_q(case, 10)
    corners = np.array([[0, 255], [255, 0]], np.uint8)
    pixels = np.repeat(corners.reshape(4, 1), 3, axis=1).reshape(1, 12)
    case.rows[0].rings["front"].append(at_ms(4), pixels, 0)
    out = case.slot()
    case.cutter.cut(out, [None], LEASE)
    edge = [0, 0.25, 0.75, 1]  # of the first row of pixels: held, then between the centres
    np.testing.assert_allclose(out["front.frames"][0, 0, 1, 0], edge, atol=1e-6)
    middle = [0.25, 0.375, 0.625, 0.75]
    np.testing.assert_allclose(out["front.frames"][0, 0, 2, 1], middle, atol=1e-6)


def test_a_policy_may_ask_for_bfloat16() -> None:
    image = ImageConfig(height=4, width=6, mean=MEAN, std=STD)
    case = rig(image)
    push_q(case, 10)
    pixels = push(case, 4)
    out = case.slot()
    case.cutter.cut(out, [None], LEASE)
    assert out["front.frames"].dtype is torch.bfloat16
    wanted = normalised(pixels, image)
    np.testing.assert_allclose(out["front.frames"][0].float(), wanted, rtol=2**-7, atol=2**-8)


def test_synthetic_frames_change_from_one_to_the_next() -> None:
    case = rig()
    case.rows[0].close()
    source = SyntheticSource(case.config, case.rows[0], seed=3, start_ns=0)
    source.drain(400 * MS)
    ring, bank = case.rows[0].rings["front"], case.banks["front"]
    assert ring.accepted == 13
    first, second = bank.values[0, 0].int(), bank.values[0, 1].int()
    assert torch.equal((first + 1) % 256, second)
    case.check()


def test_what_does_not_fit_a_camera_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "arm.toml"
    file.write_text(
        """
name = "arm"
[[streams]]
name = "front"
rate_hz = 30
dim = 5
[streams.image]
height = 480
width = 640
resize = [224]
mean = [0.5]
[[streams]]
name = "q"
rate_hz = 100
dtype = "uint8"
[window]
steps = 2
dt_ms = 10
[actions]
names = ["a"]
horizon = 1
dt_ms = 10
low = [-1]
high = [1]
lease_ms = 100
[policy]
target = "nobody:build"
"""
    )
    with pytest.raises(ConfigError) as found:
        load.read(str(file))
    text = "\n".join(found.value.problems)
    for wanted in (
        "streams[0].dim: got 5 float32, want it left out: a frame of 480 x 640 has 921600 uint8",
        "streams[0].image.resize: got [224], want height and width",
        "streams[0].image.mean: got 1 number, want one per channel, 3",
        "streams[1].dim: missing",
        "streams[1].dtype: got uint8 without image",
    ):
        assert wanted in text


class Watching(NewestValues):
    """Keeps what the policy rank is given of a camera."""

    inputs = (
        TensorSpec("state.values", (8, 5)),
        TensorSpec("front.frames", (2, 3, 4, 6), "float32"),
        TensorSpec("front.valid", (2,), "bool"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.inputs = Watching.inputs
        self.seen: list[torch.Tensor] = []

    def __call__(self, window: Any, out: Any) -> None:
        super().__call__(window, out)
        if window["front.valid"].all():
            self.seen.append(window["front.frames"].clone())


@pytest.mark.parametrize("inline", [False, True], ids=["pipelined", "inline"])
def test_frames_reach_the_policy_through_a_whole_pipeline(inline: bool, tmp_path: Path) -> None:
    small = small_config()
    front = stream("front", dim=0, rate_hz=200, image=PLAIN)
    settings = msgspec.structs.replace(small, streams=(*small.streams, front))
    policy = Watching()
    with PipelineInProcess(settings, policy, tmp_path, inline=inline) as pipeline:
        pipeline.saturate()
        while len(policy.seen) < 3:
            pipeline.rank0.run(20)
    assert policy.seen[0].shape == (1, 2, 3, 4, 6)
    step = policy.seen[0][:, 1] - policy.seen[0][:, 0]  # synthetic frames get brighter by one
    std = torch.tensor(STD)[:, None, None]
    assert torch.allclose(step[step > 0], (1 / (255 * std)).expand_as(step)[step > 0], rtol=1e-3)
