"""A server of one robot that answers for ever."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from robot_rig import make_config, serving


def main(arguments: Sequence[str]) -> None:
    """Takes the endpoint."""
    with serving(make_config(arguments[0]), answers=True):
        threading.Event().wait()
