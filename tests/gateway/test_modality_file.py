from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ppstream.config.gateway_rules import gateway_problems
from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.gateway.cli import main
from ppstream.gateway.modality_file import run_of

ARM = {"single_arm": {"start": 0, "end": 5}, "gripper": {"start": 5, "end": 6}}
MODALITY: dict[str, Any] = {
    "state": ARM,
    "action": ARM,
    "video": {"webcam": {"original_key": "observation.images.front"}, "gripper": {}},
    "annotation": {"human.validity": {}, "human.task_description": {"original_key": "task_index"}},
}
INFO: dict[str, Any] = {
    "fps": 20.0,
    "features": {
        "observation.images.front": {"shape": [48, 64, 3]},
        "observation.images.gripper": {"shape": [3, 24, 32]},
        "action": {"shape": [6], "names": [f"m{index}.pos" for index in range(6)]},
    },
}
USERS: dict[str, Any] = {
    "name": "so100",
    "actions": {"horizon": 16, "low": [-9.0] * 6, "high": [9.0] * 6, "lease_ms": 5000},
    "policy": {"target": "nobody:asks"},
    "service": {"endpoint": "tcp://127.0.0.1:0"},
}


def dataset(folder: Path, modality: Any = MODALITY, info: Any = INFO) -> Path:
    (folder / "meta").mkdir()
    (folder / "meta/modality.json").write_text(json.dumps(modality))
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


MOTORS = [f"m{index}.pos" for index in range(6)]
SO101: dict[str, Any] = {
    "fps": 30,
    "codebase_version": "v3.0",
    "features": {
        "action": {"dtype": "float32", "shape": [6], "names": MOTORS},
        "observation.state": {"dtype": "float32", "shape": [6], "names": MOTORS},
        "observation.images.front": {"dtype": "video", "shape": [48, 64, 3]},
        "observation.images.joints": {"dtype": "video", "shape": [24, 32, 3]},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    },
}


def run_with(table: dict[str, Any]) -> PipelineConfig:
    for key, value in USERS.items():
        table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
    return msgspec.convert(table, PipelineConfig)


@pytest.mark.parametrize("names", [MOTORS, {"motors": MOTORS}])
def test_a_dataset_without_modalities_makes_a_run_for_clients_of_lerobot(
    names: Any, tmp_path: Path
) -> None:
    features = SO101["features"] | {"observation.state": {"shape": [6], "names": names}}
    folder = dataset(tmp_path, info=SO101 | {"features": features})
    (folder / "meta/modality.json").unlink()
    config = run_with(tomllib.loads(run_of(str(folder))))
    assert list(gateway_problems(config)) == []
    (gateway,) = config.gateway
    assert gateway.wire == "lerobot"
    assert gateway.map == {
        "joints": MOTORS,
        "front": "front",
        "joints_camera": "joints",
        "prompt": "task",
    }
    sizes = [(one.name, one.dim, one.max_request_hz) for one in config.streams]
    assert sizes == [
        ("joints", 6, 30.0),
        ("front", 48 * 64 * 3, 30.0),
        ("joints_camera", 24 * 32 * 3, 30.0),
    ]
    assert config.actions.names[0] == "m0_pos"
    assert config.actions.dt_ms == pytest.approx(1000 / 30)


@pytest.mark.parametrize("state", [None, {"shape": [6]}, {"shape": [5], "names": MOTORS}])
def test_a_dataset_without_names_of_motors_is_refused(state: Any, tmp_path: Path) -> None:
    features = {key: one for key, one in SO101["features"].items() if "state" not in key}
    features |= {} if state is None else {"observation.state": state}
    folder = dataset(tmp_path, info=SO101 | {"features": features})
    (folder / "meta/modality.json").unlink()
    with pytest.raises(ConfigError, match=r"no names of observation\.state"):
        run_of(str(folder))


def test_a_dataset_and_what_the_user_decides_make_a_run(tmp_path: Path) -> None:
    config = run_with(tomllib.loads(run_of(str(dataset(tmp_path)))))
    assert list(gateway_problems(config)) == []
    sizes = [(one.name, one.dim, one.max_request_hz) for one in config.streams]
    assert sizes == [
        ("single_arm", 5, 20.0),
        ("gripper", 1, 20.0),
        ("webcam", 48 * 64 * 3, 20.0),
        ("gripper_camera", 24 * 32 * 3, 20.0),
    ]
    assert config.actions.names[0] == "m0_pos"
    assert config.gateway[0].map["prompt"] == "annotation.human.task_description"
    assert config.gateway[0].map["gripper_camera"] == "video.gripper"


def test_streams_are_in_the_order_of_the_datasets_vector(tmp_path: Path) -> None:
    state = {"gripper": ARM["gripper"], "single_arm": ARM["single_arm"]}
    config = run_with(tomllib.loads(run_of(str(dataset(tmp_path, {**MODALITY, "state": state})))))
    assert [one.name for one in config.streams][:2] == ["single_arm", "gripper"]


LEFT = {"left.arm": {"start": 0, "end": 5}, "left_arm": {"start": 5, "end": 6}}
TWICE = {"action": {"shape": [6], "names": ["m.0", "m_0", *MOTORS[2:]]}}


@pytest.mark.parametrize(
    ("modality", "features", "both"),
    [
        ({"state": LEFT}, {}, "'state.left.arm' and 'state.left_arm'"),
        ({"video": {"front.1": {}, "front_1": {}}}, {}, "'video.front.1' and 'video.front_1'"),
        ({"state": {"prompt": {"start": 0, "end": 6}}}, {}, "'state.prompt' and 'annotation."),
        ({}, TWICE, "'m.0' and 'm_0'"),
    ],
)
def test_keys_that_would_have_one_name_are_refused_by_both(
    tmp_path: Path, modality: Any, features: Any, both: str
) -> None:
    front = {f"observation.images.{key}": {"shape": [8, 8, 3]} for key in ("front.1", "front_1")}
    info = INFO | {"features": INFO["features"] | front | features}
    with pytest.raises(ConfigError) as caught:
        run_of(str(dataset(tmp_path, MODALITY | modality, info)))
    assert both in str(caught.value)
    assert "would both be called" in str(caught.value)


def test_cameras_and_motors_of_lerobot_that_would_have_one_name_are_refused(
    tmp_path: Path,
) -> None:
    camera = {"observation.images.front.": {"shape": [8, 8, 3]}}
    other = {"observation.images.front_": {"shape": [8, 8, 3]}}
    folder = dataset(tmp_path, info=SO101 | {"features": SO101["features"] | camera | other})
    (folder / "meta/modality.json").unlink()
    with pytest.raises(ConfigError, match=r"'front\.' and 'front_' would both be called 'front_'"):
        run_of(str(folder))


def test_a_file_alone_gives_the_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dataset(tmp_path, {**MODALITY, "annotation": {}})
    assert main(["--from", str(folder / "meta/modality.json")]) == 0
    said = capsys.readouterr().out
    assert "# Numbers of the streams: single_arm 5, gripper 1" in said
    table = tomllib.loads(said)
    assert set(table) == {"gateway"}
    assert table["gateway"][0]["action_keys"] == {"single_arm": [0, 5], "gripper": [5, 6]}
    assert "prompt" not in table["gateway"][0]["map"]


@pytest.mark.parametrize(
    ("modality", "info", "said"),
    [
        ({}, INFO, "`state`"),
        ({**MODALITY, "action": {}}, INFO, "length >= 1"),
        ([], INFO, "Expected `object`"),
        (MODALITY, {**INFO, "fps": 0}, "fps"),
        (MODALITY, {**INFO, "features": {}}, "no frames for the camera 'webcam'"),
    ],
)
def test_a_dataset_of_another_form_is_refused(
    tmp_path: Path, modality: Any, info: Any, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(str(dataset(tmp_path, modality, info)))
    assert said in str(caught.value)


def test_a_place_without_a_dataset_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--from", str(tmp_path)]) == ExitCode.CONFIG
    assert f"{tmp_path}/meta/info.json: No such file" in capsys.readouterr().err
