"""Stage C of the demo: predict what each proposal would do, and blend them by what it costs.

Candidates are the policy's proposals and variations of them; each is played through the equations
of motion from the policy's estimate of the state. It reads no sensor and keeps no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream_stages.cartpole import plant

if TYPE_CHECKING:
    from ppstream.config.schema import ActionConfig

# K=proposal N=candidate H=horizon P=step of the prediction

Array = np.ndarray[Any, Any]

#: A candidate is ``gain * (mean + spread * (proposal - mean))``: 35 variations of each proposal.
GAINS: Final = (0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06)
SPREADS: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
PREDICTION_STEP_S: Final = 1e-3
#: Softmax of -cost / (SELECTIVITY * the best cost): near candidates share, bad ones vanish.
SELECTIVITY: Final = 0.1
STATE_COST: Final = np.asarray(plant.STATE_COST)


class PredictiveDecoder:
    """Blends proposals by their predicted cost (``ppstream.Decoder``).

    The blend is the softmax weighting of model predictive path integral control (Williams et al.,
    2017), over given candidates instead of random ones.
    """

    def __init__(self, actions: ActionConfig) -> None:
        self._low, self._high = actions.low[0], actions.high[0]
        self._substeps = max(1, round(actions.dt_ms * 1e-3 / PREDICTION_STEP_S))
        a, b = plant.linearise(PREDICTION_STEP_S)
        self._terminal = plant.lqr(a, b)[1]

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def __call__(self, row: int, result: Mapping[str, Array], actions: Array) -> None:
        """Write ``actions [H, 1]`` from ``proposals [K, H, 1]`` and ``state [4]``."""
        candidates_NH = self.candidates(result["proposals"][:, :, 0].astype(np.float64))
        costs = self.costs(result["state"].astype(np.float64), candidates_NH)
        best = costs.min()
        weights = np.exp((best - costs) / (SELECTIVITY * best + 1e-9))
        actions[:, 0] = (weights / weights.sum()) @ candidates_NH

    def candidates(self, proposals_KH: Array) -> Array:
        """All variations of all proposals ``[N, H]``, within the limits."""
        mean_H = proposals_KH.mean(axis=0)
        off_KH = proposals_KH - mean_H
        variants = [gain * (mean_H + spread * off_KH) for gain in GAINS for spread in SPREADS]
        limited: Array = np.clip(np.concatenate(variants), self._low, self._high)
        return limited

    def costs(self, state: Array, candidates_NH: Array) -> Array:
        """Predicted cost ``[N]`` of each candidate from ``state [4]``; at the end the LQR's."""
        forces_PN = self._forces(candidates_NH)
        states = np.repeat(state[None], len(candidates_NH), axis=0)
        costs: Array = plant.FORCE_COST * (forces_PN**2).sum(axis=0)
        for forces in forces_PN:
            states = plant.advance(states, forces, PREDICTION_STEP_S)
            costs += (states * states) @ STATE_COST
        costs += np.einsum("ni,ij,nj->n", states, self._terminal, states)
        return costs

    def _forces(self, candidates_NH: Array) -> Array:
        """Forces ``[P, N]`` at every step of the prediction: linear between actions, as played."""
        horizon = candidates_NH.shape[1]
        at = np.arange(horizon * self._substeps) / self._substeps - 1  # the first is due after dt
        at = np.clip(at, 0, horizon - 1)
        left = np.minimum(at.astype(np.int64), horizon - 2)
        share = at - left
        forces_NP = candidates_NH[:, left] * (1 - share) + candidates_NH[:, left + 1] * share
        return np.ascontiguousarray(forces_NP.T)


def build(options: Mapping[str, Any], actions: ActionConfig) -> PredictiveDecoder:
    """The decoder for ``actions``, one force per step; it has no options."""
    return PredictiveDecoder(actions)
