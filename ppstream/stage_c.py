"""Stage C: one result of the policy to action chunks, checked and handed to the robots.

A result that may not be used is dropped with its reason; a dropped one is never emitted in part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from ppstream.clock import NS_PER_MS, now_ns
from ppstream.decode import enforce
from ppstream.errors import PolicyError
from ppstream.messages import ActionChunk

EMIT_MARGIN_NS: Final = NS_PER_MS  # an action is refused this long before its lease ends

if TYPE_CHECKING:
    from ppstream.config import PipelineConfig
    from ppstream.flight import Flight
    from ppstream.intake import Intake
    from ppstream.simulate import Delay
    from ppstream.stage import Decoder


class Emitter(Protocol):
    """Takes finished action chunks. Called from the thread that decodes; must not block."""

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        """Hand over; returns why it could not be, or None."""


class Nobody:
    """Emits to nobody: bring-up, where nothing may reach a robot."""

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class StageCStatistics:
    """Counts since the start."""

    emitted: int
    clipped_values: int
    dropped: dict[str, int]


class StageC:
    """Decodes results, one row after the other, on the thread that owns it.

    Raises ``PolicyError`` from ``decode`` after ``errors_max`` unusable results in a row.
    """

    def __init__(
        self,
        config: PipelineConfig,
        decoder: Decoder,
        simulated: Delay,
    ) -> None:
        self.intake: Intake
        self._config = config
        self._decoder = decoder
        self._simulated = simulated
        self._errors_max = config.liveness.policy_errors_max
        self._lease_ns = round(config.actions.lease_ms * NS_PER_MS)
        self._dt_ns = round(config.actions.dt_ms * NS_PER_MS)
        self._low = np.asarray(config.actions.low, dtype=np.float32)
        self._high = np.asarray(config.actions.high, dtype=np.float32)
        shape = (config.actions.horizon, len(config.actions.names))
        self._actions = np.zeros((config.batch.rows, *shape), dtype=np.float32)
        self._episodes: list[tuple[int, int]] = [(0, 0)] * config.batch.rows
        self._unusable_in_a_row = 0
        self._clipped = 0
        self.emitted = 0
        self.dropped: Counter[str] = Counter()

    def decode(self, flight: Flight, result: Mapping[str, np.ndarray[Any, Any]]) -> list[int]:
        """Decode every row that is present; returns the rows whose actions may be emitted.

        ``result`` maps the policy's output names to arrays ``[B, *shape]``.
        """
        self._simulated.spend()
        usable = [row for row, owner in enumerate(flight.owners) if owner.present]
        for row in usable:
            owner = flight.owners[row]
            if self._episodes[row] != owner.episode:
                self._episodes[row] = owner.episode
                self._decoder.reset(row)
            arrays = {name: values[row] for name, values in result.items()}
            self._decoder(row, arrays, self._actions[row])
        return usable

    def emit(self, flight: Flight, rows: list[int], emitter: Emitter) -> str | None:
        """Hand the decoded rows over; returns why nothing was emitted, or None."""
        reason: str | None = "absent"
        emitted = False
        for row in rows:
            reason = self._refuse(flight, row) or emitter.emit(row, self._chunk(flight, row))
            emitted = emitted or reason is None
        return None if emitted else reason

    def count(self, drop: str | None) -> None:
        """One envelope ended: emitted (None) or dropped with a reason."""
        if drop is None:
            self.emitted += 1
            self._unusable_in_a_row = 0
            return
        self.dropped[drop] += 1
        if drop in ("policy_error", "non_finite"):
            self._unusable_in_a_row += 1
            if self._unusable_in_a_row >= self._errors_max:
                raise PolicyError(
                    f"{self._unusable_in_a_row} results in a row could not be used (the last: "
                    f"{drop}), limit {self._errors_max}; see the policy rank's log, or raise "
                    "liveness.policy_errors_max"
                )

    def statistics(self) -> StageCStatistics:
        return StageCStatistics(self.emitted, self._clipped, dict(self.dropped))

    def _refuse(self, flight: Flight, row: int) -> str | None:
        """Why this row's actions must not reach the robot, or None."""
        owner = flight.owners[row]
        place = self.intake.rows[row]
        if owner.episode != (place.session, place.session_epoch):
            return "session_reset"
        clipped, finite = enforce(self._actions[row], self._low, self._high)
        self._clipped += clipped
        if not finite:
            return "non_finite"
        if now_ns() - flight.received_ns > self._lease_ns - EMIT_MARGIN_NS:
            return "expired"
        return None

    def _chunk(self, flight: Flight, row: int) -> ActionChunk:
        owner = flight.owners[row]
        return ActionChunk(
            session=owner.episode[0],
            session_epoch=owner.episode[1],
            epoch=flight.epoch,
            seq=flight.seq,
            window_end_ns=owner.window_end_ns,
            start_ns=owner.window_end_ns + self._dt_ns,
            dt_ns=self._dt_ns,
            expires_ns=owner.expires_ns,
            horizon=self._actions.shape[1],
            actions=memoryview(self._actions[row]).cast("B"),
        )
