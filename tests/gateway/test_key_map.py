from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ppstream.config.load import read
from ppstream.gateway.key_map import KeyMap, ObservationError

DROID = str(Path(__file__).parents[1] / "support" / "droid.toml")
FRAME = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)


def droid_map(instructions: bool = False, **entries: Any) -> KeyMap:
    config = read(DROID)
    if instructions:
        policy = msgspec.structs.replace(config.policy, instructions=True)
        config = msgspec.structs.replace(config, policy=policy)
    gateway = config.gateway[0]
    changed = msgspec.structs.replace(gateway, map=gateway.map | entries)
    return KeyMap(config, changed)


def observed(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": np.array([0.25]),
        "observation/wrist_image_left": FRAME,
    }
    found |= {f"observation/{name}": value for name, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def test_samples_have_the_streams_dtypes_and_end_with_the_reference() -> None:
    samples = droid_map().samples(observed() | {"prompt": "pick", "more": [1]})
    assert list(samples) == ["gripper", "wrist", "joints"]
    assert samples["joints"].dtype == np.float32
    assert samples["joints"].tolist() == list(range(7))
    assert samples["wrist"].dtype == np.uint8
    assert (samples["wrist"] == FRAME.reshape(-1)).all()


@pytest.mark.parametrize("grip", [0.25, np.float32(0.25), [0.25], np.array(0.25)])
def test_a_number_is_a_sample_of_one_value(grip: Any) -> None:
    assert droid_map().samples(observed(gripper_position=grip))["gripper"].tolist() == [0.25]


@pytest.mark.parametrize("layout", ["chw", "auto"])
def test_frames_of_either_layout_become_rows_of_pixels(layout: str) -> None:
    key_map = droid_map(wrist={"key": "images.wrist", "layout": layout})
    given = observed() | {"images": {"wrist": FRAME.transpose(2, 0, 1)}}
    assert (key_map.samples(given)["wrist"] == FRAME.reshape(-1)).all()


def test_floats_from_0_to_1_become_bytes() -> None:
    samples = droid_map().samples(observed(wrist_image_left=np.full((8, 6, 3), 1.0)))
    assert (samples["wrist"] == 255).all()


def test_a_key_with_dots_is_found_as_it_stands_or_by_its_parts() -> None:
    key_map = droid_map(joints="observation.state")
    for given in ({"observation.state": np.ones(7)}, {"observation": {"state": np.ones(7)}}):
        assert key_map.samples(observed() | given)["joints"].tolist() == [1] * 7


def test_an_optional_stream_may_be_missing_but_not_wrong() -> None:
    key_map = droid_map(wrist={"key": "cam", "optional": True})
    assert list(key_map.samples(observed())) == ["gripper", "joints"]
    with pytest.raises(ObservationError):
        key_map.samples(observed() | {"cam": FRAME[1:]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"joint_position": None}, "observation/joint_position: it is missing, want numbers [7]"),
        ({"joint_position": np.zeros(6)}, "got float64 [6], want numbers [7]"),
        ({"joint_position": np.zeros((7, 1))}, "got float64 [7, 1]"),
        ({"joint_position": "seven"}, "got str"),
        ({"joint_position": ["a"] * 7}, "got"),
        ({"joint_position": [[1], [2, 3]]}, "want numbers [7]"),
        ({"joint_position": np.full(7, np.nan)}, "not finite"),
        ({"joint_position": np.full(7, 1e39)}, "no float32 holds"),
        ({"joint_position": np.full(7, "x")}, "got <U1 [7]"),
        ({"joint_position": {"a": 1}}, "got dict"),
        ({"gripper_position": np.zeros(2)}, "want numbers [1] or a number"),
        ({"wrist_image_left": FRAME[:, :5]}, "got uint8 [8, 5, 3], want uint8, or floats"),
        ({"wrist_image_left": FRAME.transpose(2, 0, 1)}, "got uint8 [3, 8, 6]"),
        ({"wrist_image_left": FRAME.astype(np.int64)}, "got int64 [8, 6, 3]"),
        ({"wrist_image_left": FRAME.astype(float)}, "outside 0 to 1"),
        ({"wrist_image_left": np.full(FRAME.shape, np.nan)}, "outside 0 to 1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_is_wanted(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ObservationError) as caught:
        droid_map().samples(observed(**changes))
    assert said in str(caught.value)


def test_every_problem_is_said_at_once_and_the_keys_that_came() -> None:
    with pytest.raises(ObservationError) as caught:
        droid_map().samples({"state": 1, "observation/joint_position": np.zeros(3)})
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [
        "observation/gripper_position",
        "observation/wrist_image_left",
        "observation/joint_position",
    ]
    assert lines[3] == "got the keys 'state', 'observation/joint_position'"


@pytest.mark.parametrize("text", ["pick", b"pick", np.array("pick"), np.str_("pick")])
def test_a_prompt_may_come_as_any_text(text: Any) -> None:
    key_map = droid_map(instructions=True, prompt="prompt")
    assert key_map.prompt({"prompt": text}) == "pick"
    assert key_map.prompt({}) is None
    assert droid_map().prompt({"prompt": text}) is None


NO_TEXT = np.ndarray((), "<U1", b"\xff" * 4)  # no code point


@pytest.mark.parametrize("text", [3, b"\xff", np.zeros(2), ["pick"], NO_TEXT])
def test_a_prompt_that_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(ObservationError):
        droid_map(instructions=True, prompt="prompt").prompt({"prompt": text})


MOTORS = [f"motor_{number}.pos" for number in range(7)]


def test_several_keys_of_a_number_each_are_one_stream_in_their_order() -> None:
    key_map = droid_map(joints=MOTORS)
    numbers = [0, 1.5, np.float32(2), True, np.array(4), np.array([5]), np.int64(6)]
    given = observed() | dict(zip(reversed(MOTORS), reversed(numbers), strict=True))
    assert key_map.samples(given)["joints"].tolist() == [0, 1.5, 2, 1, 4, 5, 6]
    assert set(key_map.samples(key_map.example())) == {"joints", "gripper", "wrist"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "motor_3.pos is missing, want a number each"),
        ("left", ": got motor_3.pos str, want a number each"),
        ([1.0], ": got motor_3.pos list,"),
        (np.zeros(2), ": got motor_3.pos float64 [2],"),
        (1j, ": got motor_3.pos complex,"),
        (float("inf"), ": got motor_3.pos inf, want a number each"),
        (np.float32("nan"), ": got motor_3.pos nan,"),
    ],
)
def test_a_key_without_its_number_is_named(value: Any, said: str) -> None:
    given = observed() | dict.fromkeys(MOTORS, 0.5) | {"motor_3.pos": value}
    with pytest.raises(ObservationError) as caught:
        droid_map(joints=MOTORS).samples({k: v for k, v in given.items() if v is not None})
    assert ", ".join(MOTORS) in str(caught.value)
    assert said in str(caught.value)


def test_an_optional_stream_of_several_keys_may_be_missing_as_a_whole() -> None:
    key_map = droid_map(joints=[*MOTORS], gripper={"key": ["a"], "optional": True})
    given = {"observation/wrist_image_left": FRAME, **dict.fromkeys(MOTORS, 0.5)}
    assert "gripper" not in key_map.samples(given)
    assert key_map.samples(given | {"a": 1})["gripper"].tolist() == [1]


def test_the_example_fits_the_map() -> None:
    key_map = droid_map(instructions=True, prompt="prompt", wrist="images.wrist")
    example = key_map.example()
    assert set(key_map.samples(example)) == {"joints", "gripper", "wrist"}
    assert key_map.prompt(example)
    assert example["images"]["wrist"].shape == (8, 6, 3)


@pytest.mark.parametrize(("joints", "gripper"), [("a", "a.b"), ("a.b", "a")])
def test_an_example_has_a_key_that_is_a_part_of_another_one(joints: str, gripper: str) -> None:
    key_map = droid_map(joints={"key": joints}, gripper={"key": gripper})
    example = key_map.example()
    assert {"a", "a.b"} < set(example)
    samples = key_map.samples(example)
    assert [samples[name].shape for name in ("joints", "gripper")] == [(7,), (1,)]
