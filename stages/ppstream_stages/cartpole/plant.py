"""The cart-pole's equations of motion in numpy, for many states at once, and its LQR.

The twin of ``model.xml`` (a test compares them): stage C predicts with it, training imitates with
it. A state is ``(position m, angle rad from upright, velocity m/s, rate rad/s)``.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

CART_KG: Final = 1.0
POLE_KG: Final = 0.15
POLE_M: Final = 0.45
GRAVITY: Final = 9.81
CART_DAMPING: Final = 0.5  # N per m/s
HINGE_DAMPING: Final = 0.002  # N m per rad/s

_TOTAL_KG: Final = CART_KG + POLE_KG
_MOMENT: Final = POLE_KG * POLE_M / 2  # mass times the centre's distance from the hinge
_INERTIA: Final = POLE_KG * POLE_M**2 / 3  # of a uniform rod about its end

STATE_COST: Final = (10.0, 20.0, 2.0, 1.0)
FORCE_COST: Final = 0.05


def advance(states: Array, forces: Array, dt_s: float) -> Array:
    """States ``[N, 4]`` one semi-implicit Euler step later, under forces ``[N]`` in newtons.

    With angle a, rate w, half length c (Lagrange):
    ``(M+m) x'' + m c cos(a) a'' = F - b x' + m c sin(a) w^2`` and
    ``m c cos(a) x'' + (m l^2 / 3) a'' = m g c sin(a) - d w``.
    """
    position, angle, velocity, rate = states.T
    sine, coupling = np.sin(angle), _MOMENT * np.cos(angle)
    push = forces - CART_DAMPING * velocity + _MOMENT * sine * rate * rate
    torque = (_MOMENT * GRAVITY) * sine - HINGE_DAMPING * rate
    determinant = _TOTAL_KG * _INERTIA - coupling * coupling
    velocity = velocity + dt_s * (_INERTIA * push - coupling * torque) / determinant
    rate = rate + dt_s * (_TOTAL_KG * torque - coupling * push) / determinant
    return np.stack((position + dt_s * velocity, angle + dt_s * rate, velocity, rate), axis=1)


def linearise(dt_s: float) -> tuple[Array, Array]:
    """``(A [4, 4], B [4, 1])`` of ``advance`` at upright, by central differences."""
    nudge = 1e-6
    states = np.vstack((np.eye(4), np.zeros((1, 4)))) * nudge
    forces = np.zeros(5)
    forces[4] = nudge
    columns = (advance(states, forces, dt_s) - advance(-states, -forces, dt_s)) / (2 * nudge)
    return columns[:4].T, columns[4:].T


def lqr(a: Array, b: Array) -> tuple[Array, Array]:
    """Gain ``K [1, 4]`` of ``u = -K x`` and cost-to-go ``P [4, 4]`` for the costs above.

    Iterates the discrete Riccati equation until it stands still.
    """
    cost = np.diag(STATE_COST)
    value = cost.copy()
    for _ in range(20_000):
        gain = np.linalg.solve(FORCE_COST + b.T @ value @ b, b.T @ value @ a)
        following = cost + a.T @ value @ (a - b @ gain)
        if np.allclose(following, value, rtol=1e-10, atol=0):
            break
        value = following
    return gain, value
