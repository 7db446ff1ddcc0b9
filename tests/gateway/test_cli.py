from __future__ import annotations

import socket
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from documents import BOOKS, FENCE
from gateway_rig import certificate

from ppstream.config.gateway_rules import gateway_problems
from ppstream.config.load import read
from ppstream.config.schema import GatewayConfig
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.gateway.cli import api_key, main, tls_context
from ppstream.gateway.groot_messages import ModalityRequest

DROID = str(Path(__file__).parents[1] / "support" / "droid.toml")
SO101 = str(Path(__file__).parents[1] / "support" / "so101.toml")
PAGES = {"connect-openpi.md": DROID, "connect-groot.md": DROID, "connect-lerobot.md": SO101}
GROOT = (
    "gateway.0.wire=groot",
    "gateway.0.metadata={}",
    "gateway.0.map={joints='state.arm', gripper='state.grip', wrist='video.wrist', prompt='task'}",
    "gateway.0.action_keys={arm=[0, 7], grip=[7, 8]}",
    "policy.instructions=true",
)


def gateway(**changes: Any) -> GatewayConfig:
    return msgspec.structs.replace(read(DROID).gateway[0], **changes)


def key_file(folder: Path, text: str, mode: int = stat.S_IRUSR) -> str:
    file = folder / "key"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_describe_prints_the_map_and_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", DROID, "--describe", "--set", "gateway.0.listen=127.0.0.1:8000"]) == 0
    said = capsys.readouterr().out
    assert "  observation/joint_position: numbers [7] -> joints" in said
    assert 'client = WebsocketClientPolicy("127.0.0.1", 8000)' in said
    assert '    "observation/wrist_image_left": np.zeros((8, 6, 3), np.uint8),' in said


def test_describe_prints_a_request_of_the_newer_groot(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [word for setting in GROOT for word in ("--set", setting)]
    assert main(["--config", DROID, "--describe", *settings]) == 0
    said = capsys.readouterr().out
    assert "  state.arm: numbers [7] -> joints" in said
    assert "  action.grip: float32 [10, 1] = grip" in said
    assert '        "arm": np.zeros((1, 1, 7), np.float32),' in said
    assert '        "task": [["pick up the cup"]],' in said
    example = said.partition("observation = ")[2].partition("actions, info")[0]
    asked = ModalityRequest.of({"observation": eval(example, {"np": np})})
    assert asked.observation["video.wrist"].shape == (8, 6, 3)


def test_describe_prints_a_client_of_lerobot(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", SO101, "--describe", "--set", "gateway.0.listen=none"]) == 0
    said = capsys.readouterr().out
    assert "  shoulder_pan.pos, shoulder_lift.pos, elbow_flex.pos" in said
    assert "wrist_roll.pos: a number each -> joints" in said
    assert "--server_address=127.0.0.1:8080 --fps=30 " in said
    assert "--actions_per_chunk=10 " in said


@pytest.mark.parametrize(
    ("settings", "client", "is_reached"),
    [((), "WebsocketClientPolicy", True), (GROOT, "PolicyClient", False)],
)
def test_describe_names_a_host_as_its_client_puts_it_into_an_address(
    settings: tuple[str, ...], client: str, is_reached: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "# this client cannot reach an IPv6 address: listen on an IPv4 one for it\n"
    words = [word for one in (*settings, "gateway.0.listen=[::1]:8000") for word in ("--set", one)]
    assert main(["--config", DROID, "--describe", *words]) == 0
    said = capsys.readouterr().out
    assert f'{"" if is_reached else note}client = {client}("[::1]", 8000)' in said
    assert (note in said) is not is_reached


def test_a_run_without_a_gateway_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "demo"]) == ExitCode.CONFIG
    assert "gateway: got none" in capsys.readouterr().err


@pytest.mark.parametrize("file", [DROID, SO101])
def test_an_address_in_use_is_refused_by_name(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--config", file, "--set", f"gateway.0.listen={address}"]) == ExitCode.CONFIG
    assert f"gateway[0].listen: {address}" in capsys.readouterr().err


def test_a_folder_for_the_log_that_is_no_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", DROID, "--log", str(tmp_path)]) == ExitCode.CONFIG
    assert f"--log: {tmp_path}/run.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_the_configuration_of_the_run_book_fits_its_robot(page: str) -> None:
    (block,) = (one for one in FENCE.findall((BOOKS / page).read_text()) if "[[gateway]]" in one)
    (shown,) = tomllib.loads(block)["gateway"]
    config = read(PAGES[page], ["policy.instructions=true"])
    gateways = (msgspec.convert(shown, GatewayConfig),)
    assert list(gateway_problems(msgspec.structs.replace(config, gateway=gateways))) == []


def test_the_key_is_the_files_only_line(tmp_path: Path) -> None:
    assert api_key("gateway[0]", gateway()) is None
    wanted = gateway(api_key_file=key_file(tmp_path, "0123456789abcdef\n"))
    assert api_key("gateway[0]", wanted) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short\n", 0o600, "got 5 characters"),
        ("0123456789abcdef\nmore\n", 0o600, "that print"),
        ("0" * 2000, 0o600, "want 16 to 1024"),
        ("0123456789abcdef", 0o640, "can be read by others; chmod 600"),
    ],
)
def test_a_key_that_protects_nobody_is_refused(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    wanted = gateway(api_key_file=key_file(tmp_path, text, mode))
    with pytest.raises(ConfigError) as caught:
        api_key("gateway[0]", wanted)
    assert said in str(caught.value)
    assert text.strip() not in str(caught.value)


def test_files_that_are_no_certificate_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        tls_context("gateway[0]", gateway(certfile=DROID, keyfile=DROID))
    assert "gateway[0].certfile" in str(caught.value)


def test_a_key_file_that_asks_for_a_pass_phrase_is_refused_and_named(tmp_path: Path) -> None:
    certfile, plain = certificate(tmp_path)
    locked = str(tmp_path / "locked.pem")
    encrypt = ("openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", plain)
    subprocess.run([*encrypt, "-out", locked], check=True, capture_output=True)
    assert tls_context("gateway[0]", gateway(certfile=certfile, keyfile=plain)) is not None
    with pytest.raises(ConfigError) as caught:
        tls_context("gateway[0]", gateway(certfile=certfile, keyfile=locked))
    (said,) = caught.value.problems
    assert said.startswith(f"gateway[0].keyfile: {locked} is encrypted, want it without a pass")
    assert f"openssl pkey -in {locked} -out " in said


def test_frames_that_come_again_and_again_fault_no_pages_in() -> None:
    """In a process of its own, whose malloc keeps to glibc's first threshold: it would learn."""
    program = """
import ctypes
import resource
from ppstream.gateway.cli import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        frames = [bytes(200_000) for _ in range(9)]
        del frames
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).mallopt(-1, 128 << 10)
faults()
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    before, after = map(int, run.stdout.split())
    assert before > 50 * 100 > 50 > after
