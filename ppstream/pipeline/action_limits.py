"""ActionRules: the last guard before a robot.

Stage C applies them behind any decoder: no user code can pass a limit or emit a NaN. The rules look
at one chunk; how one chunk joins the next is the robot's (``timeline.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

import numpy as np

from ppstream import native
from ppstream.core.clock import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from ppstream.config.schema import ActionConfig, RobotLimits


Array = np.ndarray[Any, Any]


Violation = Literal["non_finite", "limit", "velocity", "acceleration"]


ROUNDING: Final = 1e-5  # of a rate limit: float32 actions that just keep it must pass


class Enforced(NamedTuple):
    """Findings: how many values were clipped, and why the chunk may not be used, or None."""

    clipped: int
    violation: Violation | None


NOTHING: Final = Enforced(0, None)


class ActionRules:
    """Rules that ``[actions]`` sets for every chunk, for one robot.

    Args:
        actions: limits and rules in the units the robot executes.
        robot: tighter limits of this robot, if it has any.
    """

    def __init__(self, actions: ActionConfig, robot: RobotLimits | None = None) -> None:
        low, high, velocity, acceleration = (
            (robot and getattr(robot, name)) or getattr(actions, name)
            for name in ("low", "high", "velocity", "acceleration")
        )
        # of every step: comparing whole arrays takes half as long as spreading one over the other
        steps = (actions.horizon, 1)
        self._low = np.tile(np.asarray(low, dtype=np.float32), steps)
        self._high = np.tile(np.asarray(high, dtype=np.float32), steps)
        # an infinite limit would let infinities through
        assert np.isfinite((self._low, self._high)).all(), "checked with the configuration"
        self._inside = np.empty((2, *self._low.shape), dtype=bool)
        self._above, self._below = self._inside  # the low limits, the high ones
        self._all_inside = np.ones_like(self._inside).tobytes()
        self._is_compiled = native.is_used
        self._limits = self._low.data, self._high.data  # cheaper to pass than arrays
        self._clips = actions.on_limit == "clip"
        self._switches = [
            (index, np.sort(np.asarray(actions.discrete[name], dtype=np.float32)))
            for index, name in enumerate(actions.names)
            if name in actions.discrete
        ]
        dt_s = self._dt_s = round(actions.dt_ms * NS_PER_MS) / NS_PER_S
        self._names = actions.names
        self._step_max = self._most(velocity, dt_s)
        self._bend_max = self._most(acceleration, dt_s * dt_s)
        self._has_rates = self._step_max is not None or self._bend_max is not None
        self._is_plain = native.is_used and not self._switches and not self._has_rates

    def enforce(self, actions: Array) -> Enforced:
        """Hold ``actions [horizon, action_dim]`` to the rules, in place.

        Discrete actions become the nearest of their values. Values outside their limits are
        clipped, or are a violation, as configured; a rate that is too high always is one. With a
        violation ``actions`` must not be executed.
        """
        if self._is_plain and native.are_inside(actions, *self._limits):
            return NOTHING
        found = NOTHING
        if self._switches or not self._is_inside(actions):
            found = self._correct(actions)
        if self._has_rates and found.violation is None:
            violation = self._rate_violation(actions)
            if violation is not None:
                return Enforced(found.clipped, violation)
        return found

    def explain(self, actions: Array, violation: Violation) -> str:
        """Words the worst place where ``actions``, as ``enforce`` left them, break a rule."""
        if violation == "non_finite":
            step, index = np.argwhere(~np.isfinite(actions))[0]
            text = f"{actions[step, index]:g} at step {step}, want a finite number"
        elif violation == "limit":
            low, high = self._low[0], self._high[0]
            step, index = _worst(np.maximum(actions - high, low - actions))
            text = f"{actions[step, index]:g} at step {step}, limits {low[index]:g} to "
            text += f"{high[index]:g}; actions.on_limit = 'clip' would clip it"
        else:
            order = 1 if violation == "velocity" else 2
            most = self._step_max if order == 1 else self._bend_max
            assert most is not None, f"{violation} without a limit"
            found = np.abs(np.diff(actions, order, axis=0))
            step, index = _worst(found / most)
            unit_s = self._dt_s**order
            rate, limit = found[step, index] / unit_s, most[index] / unit_s / (1 + ROUNDING)
            text = f"{rate:g} units/s{'2' * (order - 1)} at step {step + order}, limit "
            text += f"{limit:g} (actions.{violation})"
        return f"action {self._names[index]!r} is {text}"

    def _correct(self, actions: Array) -> Enforced:
        """The careful way, for a chunk in which something is to be switched or clipped."""
        if not np.isfinite(actions).all():
            return Enforced(0, "non_finite")
        for index, values in self._switches:
            actions[:, index] = _nearest(values, actions[:, index])
        outside = (actions < self._low) | (actions > self._high)
        clipped = int(np.count_nonzero(outside))
        if clipped:
            if not self._clips:
                return Enforced(0, "limit")
            np.clip(actions, self._low, self._high, out=actions)
        return Enforced(clipped, None)

    def _is_inside(self, actions: Array) -> bool:
        """Finite and within the limits: a NaN compares as outside."""
        if self._is_compiled:
            return native.are_inside(actions, *self._limits)
        np.greater_equal(actions, self._low, self._above)
        np.less_equal(actions, self._high, self._below)
        return self._inside.tobytes() == self._all_inside

    def _rate_violation(self, actions: Array) -> Violation | None:
        if self._step_max is not None and _is_above(np.diff(actions, axis=0), self._step_max):
            return "velocity"
        if self._bend_max is not None and _is_above(np.diff(actions, 2, axis=0), self._bend_max):
            return "acceleration"
        return None

    def _most(self, limits: Sequence[float], unit_s: float) -> Array | None:
        """Most difference between steps, ``[action_dim]``; a switch may jump."""
        if not limits:
            return None
        most = np.asarray(limits, dtype=np.float64) * unit_s * (1 + ROUNDING)
        most[[index for index, _ in self._switches]] = np.inf
        return most


def _is_above(differences: Array, most: Array) -> bool:
    return bool((np.abs(differences) > most).any())


def _worst(excess: Array) -> tuple[int, int]:
    step, index = np.unravel_index(int(np.argmax(excess)), excess.shape)
    return int(step), int(index)


def _nearest(values: Array, wanted: Array) -> Array:
    """For each of ``wanted [n]`` the nearest of the sorted ``values``; the upper one of two."""
    middles = (values[1:] + values[:-1]) / 2
    return cast("Array", values[np.searchsorted(middles, wanted, "right")])
