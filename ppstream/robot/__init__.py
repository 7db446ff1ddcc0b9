"""The robot's own process: client, timeline of actions, control loop. No torch.

Not here: rank 0's side of a session; see ``sessions``.
Start reading at ``client.py``, then ``control_loop.py``.
"""

from ppstream.robot.client import RobotClient

__all__ = ["RobotClient"]
