"""ppstream: live sensors in, timed and gated action chunks out, over a two-rank pipeline.

Names are loaded on first use, so that a robot's process never imports torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "ActionTimeline": "ppstream.robot.timeline",
    "ControlLoop": "ppstream.robot.control_loop",
    "PipelineConfig": "ppstream.config.schema",
    "Policy": "ppstream.policy.protocol",
    "PpstreamError": "ppstream.core.errors",
    "RobotClient": "ppstream.robot.client",
    "TensorSpec": "ppstream.core.specs",
}
__all__ = [
    "ActionTimeline",
    "ControlLoop",
    "PipelineConfig",
    "Policy",
    "PpstreamError",
    "RobotClient",
    "TensorSpec",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ppstream' has no attribute {name!r}")
