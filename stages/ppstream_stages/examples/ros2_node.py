"""A ROS 2 node between joint states and a position controller. ROS is imported by ``main`` alone.

Samples go out as they come, stamped by their header; actions are executed by a ``ControlLoop`` on a
thread of its own, since an executor's timers have no deadlines. Serve it with a stream ``joints``
and ``[actions] names`` = the joints; start ``forward_command_controller`` for the same joints.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ppstream import ControlLoop, RobotClient

RATE_HZ: Final = 100.0
NS_PER_S: Final = 1_000_000_000
QUEUE: Final = 1  # the newest message only: an old one is of no use to anybody


class PolicyBridge:
    """Subscribes, publishes, and owns client and control loop.

    Args:
        node: an ``rclpy`` node; its clock must be the one that stamps joint states.
        endpoint: where rank 0 listens.
        joints: in the order of the contract; messages may have another one, and more of them.
        joint_state: the message type ``sensor_msgs/JointState``.
        command: the message type ``std_msgs/Float64MultiArray``.
        rate_hz: of commands.
    """

    def __init__(
        self,
        node: Any,
        endpoint: str,
        joints: Sequence[str],
        joint_state: type,
        command: type,
        rate_hz: float = RATE_HZ,
    ) -> None:
        self._joints = list(joints)
        self._command = command
        self._clock = node.get_clock()
        self._logger = node.get_logger()
        self._publisher = node.create_publisher(command, "commands", QUEUE)
        self._subscription = node.create_subscription(
            joint_state, "joint_states", self._sample, QUEUE
        )
        self.client = RobotClient(
            endpoint,
            robot=node.get_name(),
            streams=[("joints", len(self._joints), "float64")],
            actions=self._joints,
            clock=lambda: int(self._clock.now().nanoseconds),
        )
        self.loop = ControlLoop(rate_hz, None, self._publish, self.client, hold=self._hold)
        self._is_held = False
        self._thread = threading.Thread(target=self.loop.run, name="control")

    def start(self, timeout_s: float = 10.0) -> None:
        """Connect, and move from then on. Raises as ``RobotClient.connect``."""
        self.client.connect(timeout_s)
        self._thread.start()

    def emergency_stop(self) -> None:
        """Come to rest until ``resume``: for a service call or a button."""
        self.loop.stop("emergency stop")

    def stop(self) -> None:
        """Hold, end the loop and leave."""
        self.loop.end()
        if self._thread.is_alive():
            self._thread.join()
        self.client.close()

    def resume(self) -> None:
        """Clear a fault or a stop: for a service call, by somebody who looks at the robot."""
        self.loop.clear_fault()

    def _sample(self, message: Any) -> None:
        fault = self.loop.fault
        if fault is not None and fault.reason == "loop":
            raise RuntimeError(f"the control thread has ended: {fault.text}")  # ends the spin
        positions = dict(zip(message.name, message.position, strict=False))
        if any(joint not in positions for joint in self._joints):
            return  # another publisher's joints
        stamp = message.header.stamp
        values = np.array([positions[joint] for joint in self._joints])
        self.client.push("joints", stamp.sec * NS_PER_S + stamp.nanosec, values)

    def _publish(self, action: np.ndarray[Any, Any]) -> None:
        self._is_held = False
        self._publisher.publish(self._command(data=action.tolist()))

    def _hold(self) -> None:
        """Send nothing: a position controller keeps its last command."""
        if not self._is_held and self.loop.fault is not None:
            reason = f"holding: {self.loop.fault.reason} fault, call resume"
            self._logger.warning(reason)
            self._is_held = True


def main() -> None:
    """``python -m ppstream_stages.examples.ros2_node`` in a sourced workspace."""
    try:
        import rclpy
        from sensor_msgs.msg import JointState
        from std_msgs.msg import Float64MultiArray
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing: source your ROS 2 workspace first") from None
    rclpy.init()
    node = rclpy.create_node("ppstream_robot")
    node.declare_parameter("endpoint", "unix:///tmp/ppstream-{uid}/robots")
    node.declare_parameter("joints", ["joint1"])
    endpoint, joints = (node.get_parameter(name).value for name in ("endpoint", "joints"))
    bridge = PolicyBridge(node, endpoint, joints, JointState, Float64MultiArray)
    bridge.start()
    try:
        rclpy.spin(node)
    except KeyboardInterrupt:
        pass
    finally:
        bridge.stop()
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
