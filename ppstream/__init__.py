"""ppstream: live sensors in, timed and gated action chunks out, over a pipeline of processes.

What users need is importable from here, and loaded on first use, so that a robot's process never
imports torch. The packages below are ours to move.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppstream.core.version import VERSION

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig as PipelineConfig
    from ppstream.core.errors import ConfigError as ConfigError
    from ppstream.core.errors import PpstreamError as PpstreamError
    from ppstream.core.realtime import RealTime as RealTime
    from ppstream.core.specs import TensorSpec as TensorSpec
    from ppstream.launch.start import StartedRun as StartedRun
    from ppstream.launch.start import start as start
    from ppstream.observe.attribution import block as block
    from ppstream.policy.protocol import Decoder as Decoder
    from ppstream.policy.protocol import Policy as Policy
    from ppstream.robot.async_client import AsyncRobotClient as AsyncRobotClient
    from ppstream.robot.client import RobotClient as RobotClient
    from ppstream.robot.control_loop import ControlLoop as ControlLoop
    from ppstream.robot.control_loop import LoopStatistics as LoopStatistics
    from ppstream.robot.fleet_directory import FleetDirectory as FleetDirectory
    from ppstream.robot.statistics import ClientStatistics as ClientStatistics
    from ppstream.robot.timeline import ActionTimeline as ActionTimeline
    from ppstream.wire.keys import client_keys as client_keys
    from ppstream.wire.robot_messages import ActionChunk as ActionChunk

__version__ = VERSION

_HOME = {
    "ActionChunk": "ppstream.wire.robot_messages",
    "ActionTimeline": "ppstream.robot.timeline",
    "AsyncRobotClient": "ppstream.robot.async_client",
    "ClientStatistics": "ppstream.robot.statistics",
    "ConfigError": "ppstream.core.errors",
    "ControlLoop": "ppstream.robot.control_loop",
    "Decoder": "ppstream.policy.protocol",
    "FleetDirectory": "ppstream.robot.fleet_directory",
    "LoopStatistics": "ppstream.robot.control_loop",
    "PipelineConfig": "ppstream.config.schema",
    "Policy": "ppstream.policy.protocol",
    "PpstreamError": "ppstream.core.errors",
    "RealTime": "ppstream.core.realtime",
    "RobotClient": "ppstream.robot.client",
    "StartedRun": "ppstream.launch.start",
    "TensorSpec": "ppstream.core.specs",
    "block": "ppstream.observe.attribution",
    "client_keys": "ppstream.wire.keys",
    "start": "ppstream.launch.start",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ppstream' has no attribute {name!r}")
