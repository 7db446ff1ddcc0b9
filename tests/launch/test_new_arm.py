"""``ppstream init``: what it writes works as it stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from robot_rig import HORIZON, make_chunk
from safetensors.torch import save_file

from ppstream import ConfigError
from ppstream.config.load import locate, read
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError
from ppstream.ingest.intake import build_intake
from ppstream.launch import commands, new_arm
from ppstream.launch.new_arm import Arm, toml_of
from ppstream.robot.timeline import ActionTimeline
from ppstream_stages.new_arm import robot
from ppstream_stages.new_arm.policy import build

SHIPPED = Arm("two-cameras", 6, 100.0, ("top", "wrist"), 96, 96, 30.0)
FILES = ["my-arm.toml", "my_arm_policy.py", "my_arm_robot.py", "my_arm_test.py"]


def written(folder: Path, *options: str) -> int:
    return commands.main(["init", "my-arm", "--folder", str(folder), *options])


@pytest.mark.multirank
def test_what_it_writes_becomes_ready_and_moves_the_arm(tmp_path: Path) -> None:
    assert written(tmp_path) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == FILES
    toml = tmp_path / FILES[0]  # its endpoint may be changed
    toml.write_text(toml.read_text().replace("/tmp/ppstream-{uid}/", "/tmp/ppstream-{uid}/mine/"))
    (tmp_path / "other.toml").touch()
    # its own test, as its user runs it: a run of two ranks, and the robot beside it
    path = os.pathsep.join(  # as without an activated environment
        one for one in os.environ["PATH"].split(os.pathsep) if not Path(one, "ppstream").exists()
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_arm_test.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


#: As in 3.10, where pip installs tomli: the same code under another name.
OLD_PYTHON = """
import runpy, sys, tomllib
sys.modules.update(tomli=tomllib, tomllib=None)
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("interpreter", [(), ("-c", OLD_PYTHON)], ids=["this", "3.10"])
def test_its_robot_says_what_it_waits_for_and_ends_on_ctrl_c(
    interpreter: tuple[str, ...], tmp_path: Path
) -> None:
    assert written(tmp_path) == 0
    toml = tmp_path / "my-arm.toml"
    toml.write_text(toml.read_text().replace("/tmp/ppstream-{uid}", str(tmp_path)))
    command = [sys.executable, *interpreter, str(tmp_path / "my_arm_robot.py"), str(toml)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as moved:
        assert moved.stdout is not None
        said = moved.stdout.readline()
        assert said.startswith(f"waiting for unix://{tmp_path}/robots: no answer, its ranks may ")
        moved.send_signal(signal.SIGINT)
        out, err = moved.communicate(timeout=60)
    assert (moved.returncode, err) == (0, "")
    assert "0 ticks" in out


class Served:
    """A client that gets one chunk, and whose camera ``failing`` ends with an error."""

    clock = staticmethod(now_ns)
    ready = True
    phase = "ready"
    failing = ""

    def __init__(self, endpoint: str, *, actions: Sequence[str], **_: Any) -> None:
        self.timeline = ActionTimeline(len(actions))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, timeout_s: float, **_: Any) -> None: ...

    def wait_ready(self, timeout_s: float, **_: Any) -> bool:
        now, actions = now_ns(), bytes(4 * HORIZON * self.timeline.dim)
        lasting = {"start_ns": now, "dt_ns": NS_PER_S, "expires_ns": now + 2 * NS_PER_S}
        chunk = make_chunk(end_ns=now, actions=memoryview(actions), **lasting)
        assert self.timeline.merge(chunk, now) is None
        return True

    def push(self, stream: str, stamp_ns: int, values: Any) -> bool:
        if stream == self.failing:
            raise OSError("unplugged")
        return True


@pytest.mark.parametrize(
    ("failing", "fault"), [("", "lease"), ("top", "stop: camera top: OSError('unplugged')")]
)
def test_its_robot_ends_with_the_fault_that_lets_the_arm_move_no_more(
    failing: str, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(robot, "RobotClient", Served)
    monkeypatch.setattr(Served, "failing", failing)
    with pytest.raises(SystemExit) as ended:  # Python prints it, and ends with 1
        robot.main(str(locate("two_cameras")), 10)
    assert ended.value.code == f"the arm holds after the fault {fault}; the run was ready"
    said = capsys.readouterr()
    assert f"faults: 1 (last: {fault})" in said.out
    assert said.err.endswith("OSError: unplugged\n" if failing else "")


def test_its_robot_says_in_a_line_why_a_run_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_ready(_self: Served, _timeout_s: float, **_: Any) -> bool:
        raise PeerLostError("the run is stopped: it does not become ready")

    monkeypatch.setattr(robot, "RobotClient", Served)
    monkeypatch.setattr(Served, "wait_ready", wait_ready)
    with pytest.raises(SystemExit) as ended:
        robot.main(str(locate("two_cameras")), 10)
    assert ended.value.code == "the run is stopped: it does not become ready"


def test_the_shipped_configuration_is_what_it_writes() -> None:
    text = toml_of(SHIPPED, "ppstream_stages.new_arm.policy:build")
    assert locate("two_cameras").read_text() == text
    assert [camera.image.dtype for camera in read("two_cameras").cameras if camera.image] == [
        "float32",
        "float32",
    ]


def test_its_policy_loads_the_weights_that_the_file_names(tmp_path: Path) -> None:
    assert written(tmp_path) == 0
    toml = tmp_path / "my-arm.toml"
    named = toml.read_text().replace("# weights = ", "weights = ")
    assert named != toml.read_text()
    toml.write_text(named)
    options = {"steps": 16, "joints": 6, "horizon": 16, "weights": None}
    cameras = {"top": (96, 96), "wrist": (96, 96)}
    policy = build({**options, "cameras": cameras}, torch.device("cpu"))
    saved = {key: torch.full_like(value, 0.5) for key, value in policy.head.state_dict().items()}
    save_file(saved, tmp_path / "weights.safetensors")
    path = read(str(toml)).policy.weights
    loaded = build({**options, "cameras": cameras, "weights": path}, torch.device("cpu"))
    assert all((value == 0.5).all() for value in loaded.head.state_dict().values())
    Path(path or "").write_bytes(b"garbage" * 9)
    with pytest.raises(ConfigError, match=r"policy.weights: .* cannot be read: "):
        build({**options, "cameras": cameras, "weights": path}, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "top              96 x 96 RGB at 30 Hz, newest frame as 3 x 96 x 96 float32 0..1"),
        (("--joints", "14", "--cameras"), "state.values     [1, 16, 14] float32"),
        (("--cameras", "left", "--camera-size", "480x640"), "left.frames      [1, 1, 3, 480, 640]"),
        (("--rate-hz", "500", "--frame-hz", "15"), "6 values at 500 Hz"),
        (("--frame-hz", "4", "--cameras", "top"), "top              96 x 96 RGB at 4 Hz"),
    ],
)
def test_its_options_are_in_the_run(
    options: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_arm_policy", raising=False)
    assert written(tmp_path, *options) == 0
    assert commands.main(["check", str(tmp_path / "my-arm.toml")]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("rate_hz", ["0.5", "2", "7", "1000"])
def test_a_run_of_any_rate_is_one_that_starts(rate_hz: str, tmp_path: Path) -> None:
    """Its chunks reach to the next sample, and are valid until then."""
    assert written(tmp_path, "--rate-hz", rate_hz, "--frame-hz", rate_hz) == 0
    config = read(str(tmp_path / "my-arm.toml"))
    period_ms, actions = 1000 / float(rate_hz), config.actions
    assert actions.lease_ms >= period_ms
    assert actions.horizon * actions.dt_ms >= period_ms


def test_a_camera_of_any_rate_is_one_that_its_policy_can_be_given(tmp_path: Path) -> None:
    """The policy reads frames blindly: each is young enough until the next one comes."""
    toml, rates_hz = tmp_path / "arm.toml", (0.3, 1.0, 2.0, 4.0, 4.9, 5.0, 9.0, 13.9, 60.0, 1000.0)
    for rate_hz, frame_hz in product(rates_hz, rates_hz):
        arm = Arm("arm", 2, rate_hz, ("top",), 8, 8, frame_hz)
        toml.write_text(toml_of(arm, "ppstream_stages.new_arm.policy:build"))
        config = read(str(toml))
        build_intake(config, {"state": True, "top": True})
        assert config.cameras[0].max_age_ms > 1000 / frame_hz


def test_all_mistakes_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "--joints", "0", "--cameras", "top", "joints", "--camera-size", "96", "--rate-hz", "x"
    assert commands.main(["init", "7arm", "--folder", str(tmp_path), *wrong]) == 11
    said = capsys.readouterr().err
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        "NAME",
        "--joints",
        "--cameras",
        "--camera-size",
        "--rate-hz",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_camera_called_as_the_joints_is_told_who_has_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(tmp_path, "--cameras", "joints", "7th") == 11
    assert capsys.readouterr().err.splitlines()[:2] == [
        "--cameras: got 'joints', want another name: the joints' stream has it",
        "--cameras: got '7th', want a letter, then up to 40 letters, digits, '-' or '_'",
    ]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_arm_robot.py").write_text("mine")
    assert written(tmp_path) == 11
    assert "my_arm_robot.py: exists already" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["my_arm_robot.py"]


def test_a_folder_that_cannot_be_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert written(tmp_path / "file") == 11
    assert capsys.readouterr().err == f"--folder: {tmp_path}/file: File exists\n"


def test_its_next_steps_can_be_copied_whatever_the_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(tmp_path / "my arm; ls") == 0
    assert f"cd '{tmp_path}/my arm; ls'" in capsys.readouterr().out


def test_on_a_terminal_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["seven", "7", "", "left 2", "left right"])
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(new_arm.sys, "stdin", terminal)
    monkeypatch.setattr(new_arm.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert written(tmp_path) == 0
    config = read(str(tmp_path / "my-arm.toml"))
    assert [stream.name for stream in config.streams] == ["joints", "left", "right"]
    assert (config.streams[0].dim, config.streams[0].rate_hz) == (7, 100.0)


def test_who_asks_for_no_camera_or_leaves_gets_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(_: str) -> str:
        if not answers:
            raise EOFError
        return answers.pop(0)

    monkeypatch.setattr(new_arm.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(new_arm.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    answers = ["7"]
    assert written(tmp_path) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    answers = ["", "", "none"]
    assert written(tmp_path) == 0
    assert [stream.name for stream in read(str(tmp_path / "my-arm.toml")).streams] == ["joints"]


def test_the_file_s_folder_is_importable_and_hides_nothing(tmp_path: Path) -> None:
    assert written(tmp_path) == 0
    (tmp_path / "torch.py").write_text("raise SystemExit('hidden')")
    command = [sys.executable, "-m", "ppstream.launch.commands", "check", str(tmp_path / FILES[0])]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stage B (my_arm_policy:build)" in done.stdout
