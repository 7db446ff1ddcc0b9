"""A follower arm of LeRobot's shape on the pipeline. No torch here, and no LeRobot until ``main``.

LeRobot's own loop reads, asks a policy and sends, in turn. Here the control loop reads and sends at
its rate and never asks anybody: chunks come when they come. Serve it with a stream ``joints`` of as
many values as the arm has motors, and ``[actions] names`` = the motors, in the arm's order.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from ppstream import ControlLoop, LoopStatistics, RobotClient

RATE_HZ: Final = 50.0
POSITION: Final = ".pos"  # LeRobot names a motor's position "<motor>.pos"


class Follower(Protocol):
    """Part of ``lerobot.robots.Robot`` that this needs; positions are in the arm's own units."""

    @property
    def action_features(self) -> Mapping[str, Any]: ...

    def connect(self) -> None: ...

    def get_observation(self) -> Mapping[str, Any]: ...

    def send_action(self, action: dict[str, Any]) -> Any: ...

    def disconnect(self) -> None: ...


def motors_of(robot: Follower) -> list[str]:
    """The motors that take positions, in the arm's order: the action names of its contract."""
    keys = robot.action_features
    return [key.removesuffix(POSITION) for key in keys if key.endswith(POSITION)]


class FollowerBody:
    """Reads and moves one arm; for the control loop's thread."""

    def __init__(self, robot: Follower) -> None:
        self._robot = robot
        self._keys = [motor + POSITION for motor in motors_of(robot)]

    def read(self, at_ns: int) -> dict[str, Any]:
        """One sample; the loop stamps it with the time before the read: never too young."""
        observation = self._robot.get_observation()
        return {"joints": np.array([observation[key] for key in self._keys], np.float32)}

    def write(self, action: np.ndarray[Any, Any]) -> None:
        self._robot.send_action(dict(zip(self._keys, action.tolist(), strict=True)))

    def hold(self) -> None:
        """Nothing: a position servo keeps the goal it was given last."""


def follow(
    robot: Follower,
    endpoint: str,
    *,
    name: str = "follower",
    rate_hz: float = RATE_HZ,
    duration_s: float | None = None,
) -> LoopStatistics:
    """Connect arm and pipeline, and execute until the time is over or Ctrl-C.

    Raises:
        HandshakeError: the run has other streams or motors; the message is the difference.
        PeerLostError: nobody answers at ``endpoint``.
    """
    robot.connect()
    motors = motors_of(robot)
    client = RobotClient(
        endpoint, robot=name, streams=[("joints", len(motors))], actions=motors, blend_ms=50.0
    )
    body = FollowerBody(robot)
    loop = ControlLoop(rate_hz, body.read, body.write, client, hold=body.hold)
    try:
        with client:
            client.connect()
            return loop.run(duration_s)
    except KeyboardInterrupt:
        return loop.statistics()
    finally:
        robot.disconnect()


def main(argv: Sequence[str] | None = None) -> int:
    """An SO-101 follower on a serial port."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", required=True, help="e.g. /dev/ttyACM0")
    parser.add_argument("--id", default="follower", help="of its calibration")
    parser.add_argument("--endpoint", default="unix:///tmp/ppstream-{uid}/robots")
    options = parser.parse_args(argv)
    try:
        from lerobot.robots.so_follower import SO101Follower, SO101FollowerConfig
    except ImportError:
        parser.error("LeRobot is not installed here: pip install 'lerobot[feetech]'")
    arm = SO101Follower(SO101FollowerConfig(port=options.port, id=options.id))
    statistics = follow(arm, options.endpoint)
    print(statistics.line())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
