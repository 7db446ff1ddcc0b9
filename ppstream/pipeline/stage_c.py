"""Stage C: one result of the policy to action chunks, checked and handed to the robots.

A result that may not be used is dropped with its reason; a dropped one is never emitted in part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.analysis.run_statistics import UNUSABLE
from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import PolicyError, PolicyMemoryError
from ppstream.core.user_code import Fault, fault_of
from ppstream.observe.statistics import StageCStatistics
from ppstream.pipeline.action_limits import ActionRules, Array
from ppstream.policy.protocol import DECODER
from ppstream.policy.unwritten import HOW_TO_WRITE
from ppstream.wire.fields import encoder
from ppstream.wire.robot_messages import ActionChunk, Emitter, Provenance

EMIT_MARGIN_NS: Final = NS_PER_MS  # an action is refused this long before its lease ends
VIEWS_MAX: Final = 64  # more than a link has slots
RAISED: Final = frozenset({"policy_error", "decoder_error", "unwritten"})  # a fault was told first

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.core.simulated_delay import Delay
    from ppstream.ingest.intake import Intake
    from ppstream.pipeline.flight import Flight, Owner
    from ppstream.policy.protocol import Decoder


#: Outputs of one slot, held, so that their identity stays their own; and one row of each.
_RowView = tuple[Mapping[str, Array], dict[str, Array]]


class NoEmitter:
    """Emits to nobody: bring-up, where nothing may reach a robot."""

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        return None


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
        self._is_live = config.pipeline.windows == "live"  # else no robot waits, and time is made
        self._dt_ns = round(config.actions.dt_ms * NS_PER_MS)
        self._tells_provenance = config.actions.provenance
        self._rules = ActionRules(config.actions)
        self._rules_of = {
            robot: ActionRules(config.actions, limits)
            for robot, limits in config.actions.robots.items()
        }
        shape = (config.actions.horizon, len(config.actions.names))
        self._horizon = config.actions.horizon
        self._actions = [np.full(shape, np.nan, np.float32) for _ in range(config.batch.rows)]
        self._is_blank = [True] * config.batch.rows
        self._newest: Flight | None = None  # that was decoded
        self._scratch = np.tile(np.asarray(config.actions.low, np.float32), (self._horizon, 1))
        self._bytes = [actions.data.cast("B") for actions in self._actions]
        self._views: list[dict[int, _RowView]] = [{} for _ in range(config.batch.rows)]
        self._broken: list[str | None] = [None] * config.batch.rows  # the rule, by decoded row
        self._episodes = [(0, (0, 0))] * config.batch.rows  # the epoch, and the robot's
        self._skips_answered = config.batch.rows > 1
        self._answered: list[object] = [None] * config.batch.rows  # newest episode and window end
        self._unusable_in_a_row = 0
        self.last_fault: Fault | None = None  # told before its envelope is counted
        self.on_fault: Callable[..., None]  # told the stage, a Fault, and which envelope's
        self.on_refused: Callable[[Fault], None]  # the first chunk that breaks an action rule
        self._refused: dict[str, Fault] = {}  # by rule
        self._clipped_of = [0] * config.batch.rows  # values, by decoded row
        self._chunks = self._clipped_chunks = self._clipped_values = 0
        self._violations: Counter[str] = Counter()
        self.emitted = 0
        self.dropped: Counter[str] = Counter()
        self.rows_dropped: Counter[str] = Counter()  # of envelopes that other rows may have used

    def decode(self, flight: Flight, result: Mapping[str, np.ndarray[Any, Any]]) -> list[int]:
        """Decode every row that is present, and hold it to the rules; returns these rows.

        Of several rows, one whose robot has the answer to this very window already is left out:
        another robot's sample began this envelope.

        ``result`` maps the policy's output names to arrays ``[B, *shape]``.
        """
        if self._simulated.takes_time:
            self._simulated.spend()
        decoded = []
        for row, owner in enumerate(flight.owners):
            if not owner.present or (self._skips_answered and self._has_answer(row, owner)):
                continue
            self._clipped_of[row] = 0
            self._broken[row] = self._run_decoder(row, flight, result) or self._enforce(row)
            decoded.append(row)
        return decoded

    def _run_decoder(
        self, row: int, flight: Flight, result: Mapping[str, np.ndarray[Any, Any]]
    ) -> str | None:
        """Have it write the row's actions; returns why they cannot be used, or None.

        Raises:
            UserExitError: it called ``sys.exit()``.
        """
        episode = flight.epoch, flight.owners[row].episode
        try:
            if self._episodes[row] != episode:
                self._decoder.reset(row)
                self._episodes[row] = episode
            known = self._views[row].get(id(result)) or self._view(row, result)
            arrays = {**known[1]}  # the call's own
            if not self._is_blank[row]:  # it was decoded, and not emitted
                self._blank(row)
            self._is_blank[row] = False
            self._decoder(row, arrays, self._actions[row])
        except BaseException as error:  # noqa: BLE001 - user code: one row fails, the run goes on
            self.on_fault("C", fault_of(error, DECODER), seq=flight.seq)
            return "decoder_error"
        return None

    def _view(self, row: int, result: Mapping[str, Array]) -> _RowView:
        views = self._views[row]
        if len(views) >= VIEWS_MAX:
            views.clear()
        arrays = {name: values[row] for name, values in result.items()}
        view = views[id(result)] = result, arrays
        return view

    def _blank(self, row: int) -> None:
        """Makes the row's memory NaN: what the next call leaves out is refused, not sent again."""
        self._actions[row].fill(np.nan)
        self._is_blank[row] = True

    def emit(self, flight: Flight, rows: list[int], emitter: Emitter) -> str | None:
        """Hand over the decoded rows that may be executed; returns why none was, or None.

        Leases are looked at as of ``flight.emit_ns``.
        """
        if not rows:
            return "answered" if any(owner.present for owner in flight.owners) else "absent"
        reason: str | None = None
        emitted = False
        is_served = not isinstance(emitter, NoEmitter)
        for row in rows:
            reason = self._refuse(flight, row) or emitter.emit(row, self._chunk(flight, row))
            if reason is not None:
                self.rows_dropped[reason] += 1
                continue
            emitted = True
            if self._skips_answered and is_served:
                self._answered[row] = flight.owners[row].episode, flight.owners[row].window_end_ns
        self._newest = flight
        for row in rows:  # behind the last send
            if is_served:
                self._count_rules(row)
            self._blank(row)
        return None if emitted else reason

    def rehearse(self) -> None:
        """Do what the newest envelope's chunk took, but for decoder and emitter: for nobody."""
        if (flight := self._newest) is None:
            return
        for row, owner in enumerate(flight.owners):
            if owner.present:
                self._rules.enforce(self._scratch)
                encoder.encode(self._chunk(flight, row))

    def _has_answer(self, row: int, owner: Owner) -> bool:
        answered = self._answered[row]
        return answered is not None and answered == (owner.episode, owner.window_end_ns)

    def count(self, drop: str | None) -> None:
        """One envelope ended: emitted (None) or dropped with a reason."""
        if drop is None:
            self.emitted += 1
            self._unusable_in_a_row = 0
            return
        self.dropped[drop] += 1
        if drop in UNUSABLE:
            self._unusable_in_a_row += 1
            if self._unusable_in_a_row >= self._errors_max:
                raise self._too_many(drop)

    def _too_many(self, drop: str) -> PolicyError:
        is_raised = drop in RAISED
        fault = self.last_fault if is_raised else self._refused.get(drop)
        is_memory = is_raised and fault is not None and fault.kind == "memory"
        first = "" if is_raised else ", the first time"
        why = "" if fault is None else f"{first}: {fault.line}"
        hint = f"; {HOW_TO_WRITE}" if drop == "unwritten" and HOW_TO_WRITE not in why else ""
        return (PolicyMemoryError if is_memory else PolicyError)(
            f"{self._unusable_in_a_row} results in a row could not be used, limit "
            f"liveness.policy_errors_max = {self._errors_max}; the last: {drop}{why}{hint}"
        )

    def statistics(self) -> StageCStatistics:
        return StageCStatistics(
            emitted=self.emitted,
            dropped=dict(self.dropped),
            chunks=self._chunks,
            clipped_chunks=self._clipped_chunks,
            clipped_values=self._clipped_values,
            violations=dict(self._violations),
        )

    def _count_rules(self, row: int) -> None:
        """Count what the rules did to a decoded row's chunk."""
        broken, clipped = self._broken[row], self._clipped_of[row]
        if broken == "decoder_error":  # there was no chunk
            return
        self._chunks += 1
        self._clipped_chunks += clipped > 0
        self._clipped_values += clipped
        if broken is not None:
            self._violations[broken] += 1

    def _refuse(self, flight: Flight, row: int) -> str | None:
        """Returns the reason why this row's actions must not reach the robot, or None."""
        owner = flight.owners[row]
        served = self.intake.rows[row]
        if owner.episode != (served.session, served.session_epoch):
            return "session_reset"
        if self._broken[row] is not None:
            return self._broken[row]
        age_ns = flight.emit_ns - (owner.received_ns or flight.received_ns)
        if self._is_live and age_ns > self._lease_ns - EMIT_MARGIN_NS:
            return "expired"
        return None

    def _enforce(self, row: int) -> str | None:
        """Clip the row's actions; returns which rule they break all the same, or None."""
        rules = self._rules
        if self._rules_of:
            rules = self._rules_of.get(self.intake.rows[row].robot, rules)
        self._clipped_of[row], violation = rules.enforce(self._actions[row])
        if violation is not None and violation not in self._refused:
            what = rules.explain(self._actions[row], violation)
            self._refused[violation] = Fault(violation, violation, what)
            self.on_refused(self._refused[violation])
        return violation

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
            horizon=self._horizon,
            actions=self._bytes[row],
            provenance=provenance_of(flight, row) if self._tells_provenance else None,
        )


def provenance_of(flight: Flight, row: int) -> Provenance:
    """Returns the parts of the age of a row's actions, as they are emitted."""
    record, owner = flight.record, flight.owners[row]
    ages: dict[str, int] = {}
    for stream, found in (record.input_age_ns or {}).items():
        age_ns = found[row] if isinstance(found, list) else found
        if age_ns is not None:
            ages[stream] = age_ns
    begin, sent, received, decoding = (
        stamp or 0 for stamp in (record.tA0, record.tSend, record.tRecv, record.tDecode)
    )
    b_ns, residence_ns = record.B_ns or 0, record.residence_ns or 0
    return Provenance(
        input_age_ns=ages,
        wait_a_ns=begin - owner.received_ns,
        a_ns=sent - begin,
        links_ns=received - sent - residence_ns,
        wait_b_ns=residence_ns - b_ns,
        b_ns=b_ns,
        wait_c_ns=decoding - received,
        c_ns=flight.emit_ns - decoding,
    )
