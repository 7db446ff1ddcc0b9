"""Every example against a stand-in for its library, and against a real server."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from policy_calls import in_a_row
from robot_rig import make_config, serving, wait_until
from stream_cases import held

from ppstream.core.clock import now_ns
from ppstream.core.errors import HandshakeError
from ppstream_stages.examples.lerobot_follower import follow, motors_of
from ppstream_stages.examples.ros2_node import PolicyBridge

BOOKS = Path(__file__).resolve().parents[2] / "runbooks"
RUNBOOK = BOOKS / "connect-a-robot.md"


def config_of(dtype: str = "float32", names: tuple[str, ...] = ("dx", "dy")) -> Any:
    config = make_config()
    joints = msgspec.structs.replace(config.streams[0], dim=2, dtype=dtype)
    actions = msgspec.structs.replace(config.actions, names=names)
    return msgspec.structs.replace(config, streams=(joints,), actions=actions)


class Arm:
    """LeRobot's follower shape: dictionaries of "<motor>.pos"."""

    def __init__(self) -> None:
        self.action_features = {"dx.pos": float, "dy.pos": float}
        self.sent: list[dict[str, Any]] = []
        self.is_connected = False

    def connect(self) -> None:
        self.is_connected = True

    def get_observation(self) -> dict[str, Any]:
        return {"dx.pos": 1.0, "dy.pos": 2.0, "front": np.zeros((4, 4, 3), np.uint8)}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.sent.append(action)
        return action

    def disconnect(self) -> None:
        self.is_connected = False


def test_a_follower_arm_sends_what_it_measures_and_executes_what_comes() -> None:
    arm = Arm()
    assert motors_of(arm) == ["dx", "dy"]
    with serving(config_of(), answers=True) as server:
        statistics = follow(arm, server.sessions.endpoint, duration_s=0.5)
        accepted = server.rows[0].rings["joints"].accepted
    assert statistics.executed == len(arm.sent) > 0
    assert set(arm.sent[0]) == {"dx.pos", "dy.pos"}
    assert accepted > 0
    assert not arm.is_connected


def test_a_follower_that_does_not_fit_is_left_disconnected_with_the_difference() -> None:
    arm = Arm()
    with (
        serving(config_of(names=("pan", "lift"))) as server,
        pytest.raises(HandshakeError, match="action 0: expected 'pan', got 'dx'"),
    ):
        follow(arm, server.sessions.endpoint)
    assert not arm.is_connected


class Node:
    """What the bridge needs of an rclpy node."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.warnings: list[str] = []
        self.deliver: Any = None
        self.publish: Any = self.commands.append

    def get_name(self) -> str:
        return "ppstream_robot"

    def get_clock(self) -> Any:
        return SimpleNamespace(now=lambda: SimpleNamespace(nanoseconds=now_ns()))

    def get_logger(self) -> Any:
        return SimpleNamespace(warning=self.warnings.append)

    def create_publisher(self, kind: type, topic: str, depth: int) -> Any:
        return SimpleNamespace(publish=lambda command: self.publish(command))

    def create_subscription(self, kind: type, topic: str, callback: Any, depth: int) -> Any:
        self.deliver = callback
        return callback

    def joint_state(self, **positions: float) -> None:
        sec, nanosec = divmod(now_ns(), 10**9)
        stamp = SimpleNamespace(sec=sec, nanosec=nanosec)
        self.deliver(
            SimpleNamespace(
                header=SimpleNamespace(stamp=stamp),
                name=list(positions),
                position=list(positions.values()),
            )
        )


def test_a_ros_node_reorders_joints_publishes_commands_and_says_why_it_holds() -> None:
    node = Node()
    with serving(config_of("float64"), answers=True) as server:
        bridge = PolicyBridge(
            node, server.sessions.endpoint, ["dx", "dy"], SimpleNamespace, SimpleNamespace
        )
        bridge.start()
        ring = server.rows[0].rings["joints"]
        node.joint_state(dy=2.0)  # not all joints: somebody else's message
        node.joint_state(gripper=3.0, dy=2.0, dx=1.0)
        wait_until(lambda: ring.count)
        assert ring.accepted == 1
        assert held(ring)[1] == [[1.0, 2.0]]
        # a busy machine may have let the first chunk grow too old
        wait_until(lambda: node.commands or node.joint_state(dx=1.0, dy=2.0))
        assert len(node.commands[0].data) == 2
        wait_until(lambda: node.warnings)  # no sample came any more
        assert "lease fault" in node.warnings[0]
        bridge.resume()
        published = len(node.commands)
        wait_until(lambda: node.joint_state(dx=1.0, dy=2.0) or len(node.commands) > published)
        bridge.stop()


def test_a_ros_node_whose_control_thread_ended_ends_its_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # what it prints is not enough
    with serving(config_of("float64"), answers=True) as server:
        bridge = PolicyBridge(
            node, server.sessions.endpoint, ["dx", "dy"], SimpleNamespace, SimpleNamespace
        )

        def broken(command: Any) -> None:
            raise OSError("the publisher is gone")

        def is_told() -> bool:
            try:
                node.joint_state(dx=1.0, dy=2.0)
            except RuntimeError as error:
                return "the control thread has ended: OSError: the publisher is gone" in str(error)
            return False

        node.publish = broken
        bridge.start()
        wait_until(is_told)
        bridge.stop()


@pytest.mark.parametrize("example", ["lerobot_follower", "ros2_node"])
def test_without_its_library_an_example_says_what_to_install(example: str) -> None:
    module = f"ppstream_stages.examples.{example}"
    options = ["--port", "x"] if example == "lerobot_follower" else []
    ended = subprocess.run(
        [sys.executable, "-m", module, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "not installed here" in ended.stderr or "is missing: source" in ended.stderr


@pytest.fixture
def my_arm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The driver that the run-book's code imports."""
    module = ModuleType("my_arm")
    module.moved = []  # type: ignore[attr-defined]

    class Driver:
        def positions(self) -> list[float]:
            return [0.0] * 7

        def move_to(self, action: Any) -> None:
            module.moved.append(action)  # type: ignore[attr-defined]

        def slow_to(self, share: float) -> None:
            module.moved.append(share)  # type: ignore[attr-defined]

        def brake(self) -> None:
            pass

    module.Arm = Driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_arm", module)
    return module


def test_the_code_of_the_run_book_moves_an_arm(my_arm: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", RUNBOOK.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 22
    names = tuple(f"j{number}" for number in range(1, 8))
    config = make_config()
    joints = msgspec.structs.replace(config.streams[0], dim=7)
    actions = msgspec.structs.replace(config.actions, names=names, low=(-1.0,) * 7, high=(1.0,) * 7)
    config = msgspec.structs.replace(config, streams=(joints,), actions=actions)
    with serving(config, answers=False) as server:
        code = code.replace("unix:///tmp/ppstream-{uid}/robots", server.sessions.endpoint)
        scope: dict[str, Any] = {}
        body, _, run = code.rpartition("with client")
        exec(compile(body, str(RUNBOOK), "exec"), scope)
        thread = threading.Thread(target=lambda: exec("with client" + run, scope))
        thread.start()
        wait_until(lambda: server.rows[0].present)
        row = server.rows[0]
        from robot_rig import make_chunk

        steps = np.full((4, 7), 0.25, np.float32)
        chunk = make_chunk(
            session=row.session,
            end_ns=row.rings["joints"].newest_ns,
            actions=memoryview(steps.tobytes()),
        )
        server.order(lambda: server.sessions.emit(0, chunk))
        wait_until(lambda: any(np.allclose(moved, 0.25) for moved in my_arm.moved))
        wait_until(lambda: my_arm.moved and isinstance(my_arm.moved[-1], float))  # the ramp
        scope["loop"].end()
        thread.join(10)


class Eyes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 256, 16, 16)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.patches(frames.flatten(0, 1))
        return seen.flatten(2).transpose(1, 2)


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Linear(14, 256), torch.nn.Linear(256, 50 * 7)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        x = torch.cat([tokens, self.embed(state)], dim=1).mean(dim=1)
        return torch.tanh(self.head(x)).unflatten(1, (50, 7))


def test_the_parts_of_the_run_book_give_the_actions_of_the_uncut_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (BOOKS / "cut-your-policy.md").read_text(), re.DOTALL
    )
    assert len([line for line in code.splitlines() if line]) <= 20
    network = torch.nn.ModuleDict({"eyes": Eyes(), "body": Body()})
    module = ModuleType("my_policy")
    module.trained = lambda: network  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_policy", module)
    scope: dict[str, Any] = {}
    exec(compile(code, "cut-your-policy.md", "exec"), scope)
    parts = scope["build"]({}, torch.device("cpu"))
    assert [part.name for part in parts] == ["eyes", "body"]
    assert not any(hasattr(part, "net") for part in parts)
    for part in parts:
        part.load()
    frames, state = torch.rand(2, 1, 3, 224, 224), torch.rand(2, 32, 14)
    made = in_a_row(parts, {"front.frames": frames, "state.values": state})
    with torch.inference_mode():
        expected = network["body"](network["eyes"](frames), state)
    assert torch.equal(made["actions"], expected)
