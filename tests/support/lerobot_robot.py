"""A robot with the client that LeRobot publishes, in an environment of its own.

``lerobot_robot.py ADDRESS ACTIONS ACTIONS_PER_CHUNK`` plays so many actions of a policy that echoes
positions, checks that each is of an observation that was sent, and prints what happened as JSON.
LeRobot's client, its transport and its control loop are unmodified; libraries that its policies and
datasets alone use are stood in for, so that they need not be installed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from stand_ins import stand_in_for

ABSENT = {
    *("accelerate", "av", "cv2", "datasets", "diffusers", "gymnasium", "imageio", "jsonlines"),
    *("pandas", "pyarrow", "torchvision", "transformers"),
}


stand_in_for(ABSENT)

from lerobot.async_inference.configs import RobotClientConfig  # noqa: E402
from lerobot.async_inference.robot_client import RobotClient  # noqa: E402
from lerobot.robots import Robot, RobotConfig  # noqa: E402

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
CAMERAS = dict.fromkeys(("front", "top", "wrist"), (480, 640, 3))  # together more than one piece


@RobotConfig.register_subclass("fake_arm")
@dataclass(kw_only=True)
class FakeArmConfig(RobotConfig):
    pass


class FakeArm(Robot):
    """Six motors at made-up positions, which name the observation, and three cameras."""

    config_class = FakeArmConfig
    name = "fake_arm"

    def __init__(self, config: FakeArmConfig) -> None:
        super().__init__(config)
        self.observations = 0
        self.executed: list[int] = []  # number of the observation that each action echoes
        self.strange: list[Any] = []
        self.wanted = 0
        self.enough = threading.Event()
        self.frames = {name: np.zeros(shape, np.uint8) for name, shape in CAMERAS.items()}

    @property
    def observation_features(self) -> dict[str, Any]:
        return {f"{motor}.pos": float for motor in MOTORS} | CAMERAS

    @property
    def action_features(self) -> dict[str, Any]:
        return {f"{motor}.pos": float for motor in MOTORS}

    @property
    def is_connected(self) -> bool:
        return True

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None: ...

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def disconnect(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        self.observations += 1
        positions = {
            f"{motor}.pos": self.observations / 4096 + index / 8
            for index, motor in enumerate(MOTORS)
        }
        return positions | self.frames

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        first, *_ = found = list(action.values())
        number = round(first * 4096)
        if found == [number / 4096 + index / 8 for index in range(len(MOTORS))]:
            self.executed.append(number)
        else:
            self.strange.append(found)
        if len(self.executed) + len(self.strange) >= self.wanted:
            self.enough.set()
        return action


def main(address: str, actions: str, actions_per_chunk: str) -> None:
    config = RobotClientConfig(
        policy_type="act",
        pretrained_name_or_path="nobody/loads-this",
        robot=FakeArmConfig(id="fake"),
        actions_per_chunk=int(actions_per_chunk),
        task="do something",
        server_address=address,
        fps=30,
        aggregate_fn_name="latest_only",
    )
    client = RobotClient(config)
    arm = client.robot
    arm.wanted = int(actions)
    started = client.start()
    began = time.perf_counter()
    if started:
        receiving = threading.Thread(target=client.receive_actions, daemon=True)
        controlling = threading.Thread(target=client.control_loop, args=(config.task,), daemon=True)
        receiving.start()
        controlling.start()
        arm.enough.wait(60)
        client.stop()
        receiving.join(20)
        controlling.join(20)
    found = {
        "version": version("lerobot"),
        "started": started,
        "seconds": time.perf_counter() - began,
        "observations": arm.observations,
        "executed": arm.executed,
        "strange": arm.strange,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
