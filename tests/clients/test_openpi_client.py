"""The client that openpi publishes, unmodified, against a real run with a gateway."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from gateway_rig import certificate
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from ranks import Ranks

from ppstream.core.errors import ExitCode
from ppstream.wire.openpi import decode, encode

PACKAGE = "openpi-client"
ROBOT = Path(__file__).parents[1] / "support" / "openpi_robot.py"
REQUESTS = 200
LIMIT_S = 100
KEY = "0123456789abcdef0123"
CAMERA: dict[str, Any] = {"max_request_hz": 500, "image": {"height": 224, "width": 224}}
#: By robot: numbers as (stream, dim, key), cameras as (stream, entry of the map), actions, horizon.
RUNS: dict[str, tuple[list[tuple[str, int, str]], list[tuple[str, Any]], int, int]] = {
    "droid": (
        [
            ("joints", 7, "observation/joint_position"),
            ("gripper", 1, "observation/gripper_position"),
        ],
        [
            ("exterior", "observation/exterior_image_1_left"),
            ("wrist", {"key": "observation/wrist_image_left", "layout": "hwc"}),
        ],
        8,
        10,
    ),
    "aloha": (
        [("state", 14, "state")],
        [
            ("high", {"key": "images.cam_high", "layout": "chw"}),
            ("low", "images.cam_low"),
            ("left", "images.cam_left_wrist"),
            ("right", {"key": "images.cam_right_wrist", "optional": True}),
        ],
        14,
        50,
    ),
    "libero": (
        [("state", 8, "observation/state")],
        [("image", "observation/image"), ("wrist", "observation/wrist_image")],
        7,
        10,
    ),
}


def run_of(robot: str, folder: Path) -> Path:
    """A run's TOML for a robot of openpi's examples, which echoes its numbers."""
    numbers, cameras, actions, horizon = RUNS[robot]
    values = sum(dim for _, dim, _ in numbers)
    table = {
        "name": robot,
        "streams": [
            {"name": name, "dim": dim, "max_request_hz": 500, "reference": not index}
            for index, (name, dim, _) in enumerate(numbers)
        ]
        + [{"name": name, **CAMERA} for name, _ in cameras],
        "window": {"steps": 1, "dt_ms": 20},
        "actions": {
            "names": [f"a{index}" for index in range(actions)],
            "horizon": horizon,
            "dt_ms": 20,
            "low": [-9.0] * actions,
            "high": [9.0] * actions,
            "lease_ms": 20_000,
        },
        "policy": {
            "target": "ppstream_stages.echo:build",
            "options": {"steps": 1, "dim": values, "horizon": horizon, "action_dim": actions},
        },
        "service": {"endpoint": f"unix://{folder}/robots"},
        "gateway": [
            {
                "wire": "openpi",
                "listen": "127.0.0.1:0",
                "timeout_ms": 20_000,
                "map": {name: key for name, _, key in numbers} | dict(cameras),
                "metadata": {"reset_pose": [0, -1.5]},
            }
        ],
    }
    file = folder / f"{robot}.toml"
    file.write_text("\n".join(toml(table)))
    return file


def toml(table: dict[str, Any]) -> list[str]:
    tables = {key: value for key, value in table.items() if is_table(value)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if key not in tables]
    for key, value in tables.items():
        for one in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{key}]]" if isinstance(value, list) else f"[{key}]"]
            lines += [f"{name} = {inline(entry)}" for name, entry in one.items()]
    return lines


def is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict))


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {inline(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def ask(python: str, *words: str, trusted: str | None = None) -> dict[str, Any]:
    """The robot's findings; it trusts the certificate of the file ``trusted``, too."""
    done = subprocess.run(
        [python, str(ROBOT), *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | ({} if trusted is None else {"SSL_CERT_FILE": trusted}),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("robot", RUNS)
def test_requests_of_openpis_examples_are_answered_with_their_own_actions(
    robot: str, python: str, tmp_path: Path
) -> None:
    with Ranks(tmp_path, config=run_of(robot, tmp_path), world_size=2) as ranks:
        address = ranks.gateway_address("openpi")
        with urlopen(address.replace("ws:", "http:") + "/healthz", timeout=20) as health:
            assert (health.status, health.read()) == (200, b"OK\n")
        found = ask(python, address, robot, str(REQUESTS))
        shape = [RUNS[robot][2]]
        assert found["steps"] == [shape] * 7
        assert found["metadata"]["reset_pose"] == [0, -1.5]
        assert found["metadata"]["ppstream"]["run"] == robot
        assert found["errors"][0].startswith("RuntimeError: Error in inference server:")
        assert "it is missing, want" in found["errors"][0]
        assert "1011" in found["errors"][1]
        ranks.processes[0].terminate()
        assert ranks.wait() == [ExitCode.DRAINED] * 2
        print(f"{robot}: openpi-client {found['version']}, p50 {found['p50_ms']:.2f} ms")


@pytest.mark.timeout(240)
def test_a_client_with_the_key_is_served_and_one_without_is_not(
    python: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    setting = f"gateway.0.api_key_file={file}"
    with Ranks(tmp_path, setting, config=run_of("libero", tmp_path), world_size=1) as ranks:
        address = ranks.gateway_address("openpi")
        assert ask(python, address, "libero", "5", KEY)["p50_ms"] > 0
        with pytest.raises(AssertionError, match="HTTP 401"):
            ask(python, address, "libero", "5")


@pytest.mark.timeout(240)
def test_a_client_that_trusts_the_certificate_is_served_over_tls_and_no_other(
    python: str, tmp_path: Path
) -> None:
    trusted, key = certificate(tmp_path)
    settings = (f"gateway.0.certfile={trusted}", f"gateway.0.keyfile={key}")
    with Ranks(tmp_path, *settings, config=run_of("libero", tmp_path), world_size=1) as ranks:
        address = ranks.gateway_address("openpi")
        assert address.startswith("wss://127.0.0.1:")
        address = address.replace("127.0.0.1", "localhost")
        assert ask(python, address, "libero", "5", trusted=trusted)["p50_ms"] > 0
        with pytest.raises(AssertionError, match="certificate verify failed"):
            ask(python, address, "libero", "5")
        with pytest.raises(AssertionError, match=r"InvalidMessage|ConnectionClosed|EOFError"):
            ask(python, address.replace("wss:", "ws:"), "libero", "5")


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.binary(max_size=300),
    arrays.arrays(
        st.one_of(
            arrays.boolean_dtypes(),
            arrays.integer_dtypes(),
            arrays.unsigned_integer_dtypes(),
            arrays.floating_dtypes(sizes=(16, 32, 64)),
        ),
        arrays.array_shapes(min_dims=0, min_side=0, max_side=5),
    ),
    arrays.floating_dtypes(sizes=(16, 32)).map(lambda dtype: dtype.type(1.5)),
    arrays.unsigned_integer_dtypes().map(lambda dtype: dtype.type(200)),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner),
    max_leaves=20,
)


def test_bytes_are_those_of_the_client_for_any_message(python: str, tmp_path: Path) -> None:
    """Each message is packed here, read and packed again there: the bytes must be the same."""
    packed: list[bytes] = []

    @settings(max_examples=500, phases=[Phase.generate], deadline=None, database=None)
    @given(st.dictionaries(st.text(max_size=40), values, max_size=5))
    def collect(message: dict[str, Any]) -> None:
        packed.append(encode(message))
        decode(packed[-1])

    collect()
    file = tmp_path / "messages"
    file.write_text("\n".join(one.hex() for one in packed))
    done = subprocess.run(
        [python, str(ROBOT), "repack", str(file)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert [bytes.fromhex(line) for line in done.stdout.split()] == packed
    assert len(packed) >= 500
