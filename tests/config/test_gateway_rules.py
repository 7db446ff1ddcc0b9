from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from ppstream.config import gateway_rules
from ppstream.config.doubts import warnings
from ppstream.config.gateway_rules import (
    WIRES,
    KeyEntry,
    gateway_problems,
    key_entries,
    listen_address,
    listen_of,
    missing_libraries,
)
from ppstream.config.load import as_toml, read
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.errors import ConfigError

DROID = str(Path(__file__).parents[1] / "support" / "droid.toml")
MAP = {"joints": "a/b", "gripper": "c.d", "wrist": {"key": "e", "layout": "chw"}}
OPEN = "0.0.0.0:8000"
GROOT = {
    "wire": "groot",
    "metadata": {},
    "map": {"joints": "state.arm", "gripper": "state.grip", "wrist": "video.wrist"},
    "action_keys": {"arm": (0, 7), "grip": (7, 8)},
}


def droid(**changes: Any) -> PipelineConfig:
    config = read(DROID)
    gateway = msgspec.structs.replace(config.gateway[0], **{"map": MAP, **changes})
    return msgspec.structs.replace(config, gateway=(gateway,))


def found(config: PipelineConfig) -> str:
    return "\n".join(gateway_problems(config))


def test_a_gateway_that_agrees_with_its_run_is_no_problem() -> None:
    assert found(droid()) == ""
    assert key_entries(droid().gateway[0])["wrist"] == KeyEntry("e", "chw", optional=False)


def test_streams_at_a_rate_beside_a_gateway_are_a_warning_each() -> None:
    assert list(warnings(droid())) == []
    joints, *others = droid().streams
    paced = msgspec.structs.replace(joints, rate_hz=15.0, max_request_hz=None)
    (told,) = warnings(msgspec.structs.replace(droid(), streams=(paced, *others)))
    assert told.startswith("streams[0].rate_hz: got 15 beside a gateway")
    assert told.endswith("joints is called slow or silent; want max_request_hz in its place")
    assert not list(
        warnings(msgspec.structs.replace(droid(), streams=(paced, *others), gateway=()))
    )


def test_a_gateway_survives_the_way_through_toml(tmp_path: Path) -> None:
    config = droid(**GROOT)
    file = tmp_path / "again.toml"
    file.write_text(as_toml(config))
    assert read(str(file)).gateway == config.gateway


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"listen": "8000"}, "gateway[0].listen: got '8000', want ADDRESS:PORT"),
        ({"listen": "127.0.0.1:70000"}, "want ADDRESS:PORT"),
        ({"listen": OPEN}, "gateway[0].api_key_file: missing"),
        ({"listen": OPEN, "api_key_file": DROID}, "gateway[0].certfile: missing"),
        ({"certfile": DROID}, "gateway[0].certfile: got it or keyfile alone"),
        ({"api_key_file": "/nowhere"}, "gateway[0].api_key_file: got '/nowhere', which is not"),
        ({"endpoint": "nonsense"}, "gateway[0].endpoint: got 'nonsense'"),
        ({"endpoint": "tcp://10.0.0.1:5870"}, "gateway[0].secret_key: missing"),
        ({"secret_key": DROID}, "gateway[0].secret_key: got it or server_key alone"),
        ({"map": MAP | {"arm": "x"}}, "gateway[0].map.arm: got no stream's name"),
        ({"map": {"joints": "a"}}, "gateway[0].map.wrist: missing, want the key of stream"),
        ({"map": MAP | {"joints": 3}}, "gateway[0].map.joints: got 3, want a key"),
        ({"map": MAP | {"joints": ""}}, "gateway[0].map.joints.key: got ''"),
        ({"map": MAP | {"joints": {"key": "a", "lay": 1}}}, "map.joints.lay: unknown key"),
        ({"map": MAP | {"joints": {"key": "a", "layout": "hwc"}}}, "map.joints.layout: got one"),
        ({"map": MAP | {"wrist": {"key": "a", "layout": "nchw"}}}, "want one of auto, hwc, chw"),
        ({"map": MAP | {"wrist": {"key": "a", "optional": 1}}}, "map.wrist.optional: got 1"),
        (
            {"map": MAP | {"joints": {"key": "a", "optional": True}}},
            "map.joints.optional: got true",
        ),
        ({"map": MAP | {"prompt": "prompt"}}, "map.prompt: got 'prompt' with policy.instructions"),
        ({"map": MAP | {"prompt": {"key": "a"}}}, "want the key of the instruction"),
        ({"map": MAP | {"joints": ["a"] * 7}}, "map.joints.key: got ['a', 'a'"),
        ({"map": MAP | {"joints": ["a", "b"]}}, "map.joints.key: got 2 keys, want 7"),
        ({"map": MAP | {"joints": [1] * 7}}, "want texts"),
        ({"map": MAP | {"wrist": ["a"]}}, "map.wrist.key: got a list, want one key"),
        ({"metadata": {"a": [{"b": None}]}}, "gateway[0].metadata.a[0].b: got None"),
    ],
)
def test_each_disagreement_is_said_with_its_place(changes: dict[str, Any], said: str) -> None:
    assert said in found(droid(**changes))


def test_all_problems_of_a_map_are_said_at_once() -> None:
    lines = found(droid(map={"arm": "x", "joints": 3, "prompt": "p"})).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "gateway[0].map.gripper",
        "gateway[0].map.wrist",
        "gateway[0].map.arm",
        "gateway[0].map.joints",
        "gateway[0].map.prompt",
    ]


def test_without_streams_their_number_is_said_and_no_map_is_judged() -> None:
    with pytest.raises(ConfigError) as caught:
        read(DROID, ["streams=[]", "gateway.0.listen=nonsense"])
    assert [line.split(", ")[0] for line in caught.value.problems] == [
        "streams: got 0 of them",
        "gateway[0].listen: got 'nonsense'",
    ]


def test_two_gateways_cannot_listen_at_one_address() -> None:
    config = droid(listen="127.0.0.1:8000")
    assert "twice" in found(msgspec.structs.replace(config, gateway=2 * config.gateway))
    free = droid(listen="127.0.0.1:0")
    assert "twice" not in found(msgspec.structs.replace(free, gateway=2 * free.gateway))


def test_a_recording_leaves_no_room_for_a_gateway() -> None:
    config = droid()
    service = msgspec.structs.replace(config.service, recording="a.mcap")
    assert "service.recording" in found(msgspec.structs.replace(config, service=service))


def test_an_exact_answer_needs_windows_that_wait_for_the_reference() -> None:
    config = droid()
    shape = msgspec.structs.replace(config.pipeline, pacing="sample:gripper")
    assert "gateway[0].answer" in found(msgspec.structs.replace(config, pipeline=shape))
    newest = msgspec.structs.replace(droid(answer="newest"), pipeline=shape)
    assert "answer" not in found(newest)


@pytest.mark.parametrize(
    ("listen", "wanted"),
    [("[::1]:8000", ("::1", 8000)), ("localhost:0", ("localhost", 0)), ("a b:1", None)],
)
def test_addresses_are_taken_apart(listen: str, wanted: tuple[str, int] | None) -> None:
    assert listen_address(listen) == wanted


def test_every_wire_has_its_rules_and_an_address_of_loopback() -> None:
    assert tuple(WIRES) == get_args(get_type_hints(GatewayConfig)["wire"])
    config = read(DROID, ["gateway.0.listen=none"])
    assert listen_of(config.gateway[0]) == "127.0.0.1:8000"
    assert all("127.0.0.1" in rules.listen for rules in WIRES.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**GROOT, "certfile": DROID, "keyfile": DROID}, "gateway[0].certfile: got"),
        ({**GROOT, "metadata": {"a": 1}}, "gateway[0].metadata: got {'a': 1}, want none"),
        ({**GROOT, "listen": OPEN}, "gateway[0].api_key_file: missing"),
        ({"action_keys": {"arm": (0, 8)}}, "gateway[0].action_keys: got {'arm': (0, 8)}, want no"),
        ({"generation": "n1.5"}, "gateway[0].generation: got 'n1.5', want none"),
        ({"wire": "lerobot", "answer": "newest"}, "gateway[0].answer: got 'newest', want none"),
        ({"wire": "lerobot"}, "map.joints: got 'a/b', want a list of 7 keys"),
        ({"wire": "lerobot", "listen": OPEN}, "gateway[0].listen: got '0.0.0.0:8000', want an"),
    ],
)
def test_what_a_wire_lacks_is_not_configured(changes: dict[str, Any], said: str) -> None:
    assert said in found(droid(**{"metadata": {}, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"action_keys": {}}, "gateway[0].action_keys: got action 'j1' (0) 0 times, want it in"),
        ({"action_keys": {"a": (0, 8), "b": (7, 8)}}, "action 'grip' (7) 2 times"),
        ({"action_keys": {"a": (0, 8), "b": (7, 9)}}, "action_keys.b: got [7, 9], want a part"),
        ({"action_keys": {"a": (0, 8), "b": (7, 10**15)}}, "action_keys.b: got [7, 1000000"),
        ({"action_keys": {"a": (0, 8), "b": (3, 3)}}, "action_keys.b: got [3, 3]"),
        ({"map": {**GROOT["map"], "wrist": "state.w"}}, "map.wrist: got 'state.w', want video."),
        ({"map": {**GROOT["map"], "joints": {"key": "arm"}}}, "map.joints: got 'arm', want state"),
    ],
)
def test_the_parts_of_a_groot_are_checked_with_the_run(changes: dict[str, Any], said: str) -> None:
    assert found(droid(**GROOT)) == ""
    assert said in found(droid(**{**GROOT, **changes}))


def test_a_library_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_rules, "find_spec", lambda name: None if name == "grpc" else name)
    assert missing_libraries(droid()) == []
    (missing,) = missing_libraries(droid(wire="lerobot"))
    assert missing == "gateway: wire = 'lerobot' needs grpc: pip install 'ppstream[gateway]'"


def test_ipv6_loopback_needs_no_key() -> None:
    assert found(droid(listen="[::1]:8000")) == ""


def test_a_gateway_without_a_map_is_refused_by_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        read(DROID, ["gateway.0.map=3", "gateway.0.wire=ros"])
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "gateway[0].wire",
        "gateway[0].map",
    ]
    assert isinstance(read(DROID).gateway[0], GatewayConfig)
