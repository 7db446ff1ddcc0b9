"""Phases of a run, as rank 0 tells them, and those that mean the same to whoever hears them."""

from __future__ import annotations

from typing import Final

BRING_UP: Final = "bring-up"
#: Robots are served, and samples and actions flow; degraded: not by all there is. Else robots hold.
SERVING: Final = frozenset({"ready", "degraded"})
ENDING: Final = frozenset({"draining", "stopped"})  # nobody is admitted, and robots leave
PHASES: Final = ("starting", "warming", BRING_UP, "ready", "degraded", "draining", "stopped")
