"""Robots that ask on request: do they wait for each answer, and how does a gateway answer? Pure.

A robot in lock-step has one request in flight. Whatever the depth of the queues, its own windows
follow each other, and only windows of other robots can overlap with them. What a gateway counted
of its clients' requests is added up by wire and robot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ppstream.analysis.json_values import mapping_of, shown
from ppstream.analysis.records import GATEWAY, Envelope, Json, LogEvent, RobotRequests

WINDOWS_MIN: Final = 20  # fewer show no habit
ROW_NAMES: Final = ("session", "session_epoch", "window_end_ns")
AHEAD_MAX: Final = 0.01  # of the windows: a request that timed out is asked again
ROBOTS_MAX: Final = 64  # that a report names, of requests by wire; the others are summed


class Requests(NamedTuple):
    """Windows with an observation that no earlier one had, of robots that ask on request."""

    envelopes: int  # with one at least
    windows: int
    ahead: int  # begun while the same robot's window before was under way

    @property
    def in_step(self) -> bool:
        """True when robots waited for each answer before they asked again."""
        return self.windows >= WINDOWS_MIN and self.ahead <= AHEAD_MAX * self.windows

    @property
    def share(self) -> float:
        """Windows in an envelope."""
        return self.windows / self.envelopes if self.envelopes else 0.0

    @property
    def text(self) -> str:
        """For people: what it means for overlap, and what would change it; empty: nothing."""
        if not self.in_step:
            return ""
        return (
            f"robots ask in lock-step: {self.windows - self.ahead} of {self.windows} windows in "
            "service began with their robot's answer before it out, so one robot by itself "
            f"overlaps nothing; an envelope answers {self.share:.2f} robots. What does more at "
            'once: robots that share envelopes (pipeline.pacing = "rows"), answer = "newest" of '
            "the gateway, or RobotClient, which sends without waiting"
        )


class WindowRequests:
    """Counts robots with a newer window, for the reader: lines come in the order of their ends.

    Attributes:
        first_waits_ns: by session, from the first envelope with its row to its first chunk; until
            there is one, to the end of the newest. Of robots that ask, from their first window.
        gaps_ns: by session, the longest from one chunk to the next.
    """

    def __init__(self, *, is_asked: bool = False) -> None:
        self._is_asked = is_asked  # streams come on request: who sends nothing waits for nothing
        self.first_waits_ns: dict[int, int] = {}
        self.gaps_ns: dict[int, int] = {}
        self._chunk_ns: dict[int, int] = {}  # the newest of each session
        self._begun_ns: dict[int, int] = {}  # of each session that has no chunk yet
        #: By session: its newest episode and window's end, and when that envelope was over.
        self._newest: dict[int, tuple[tuple[int, int], int]] = {}

    def count(self, envelope: Envelope, line: Json) -> None:
        """Fill in an envelope's counts from its line, where that names the rows."""
        session, episode, end = map(line.get, ROW_NAMES)
        rows: list[Any] = [(session, episode, end)]
        if not type(session) is type(episode) is type(end) is int:
            rows = [*zip(*map(_of_rows, (session, episode, end)), strict=False)]
        if not any(rows):
            return
        envelope.asked = envelope.asked_ahead = 0
        for session, episode, end in rows:
            if session > 0:
                self._wait(session, envelope, has_window=bool(end))
            if session > 0 and end:  # else its row was absent, and had no chunk
                self._chunk(session, envelope)
            before, over_ns = self._newest.get(session, (None, 0))
            if session <= 0 or not end or before == (episode, end):  # no robot, or nothing new
                continue
            envelope.asked += 1
            envelope.asked_ahead += over_ns > (envelope.tA0 or 0)
            self._newest[session] = (episode, end), envelope.tEmit or 0

    def _wait(self, session: int, envelope: Envelope, *, has_window: bool) -> None:
        """Counts the envelope to the wait; one of other robots alone does not end it."""
        begun_ns = self._begun_ns.get(session)
        is_over = begun_ns is None and session in self.first_waits_ns
        if envelope.tA0 is None or is_over:
            return
        if begun_ns is None:
            if self._is_asked and not has_window:
                return
            begun_ns = self._begun_ns[session] = envelope.tA0
        stamps = (envelope.tEmit, envelope.tDecode, envelope.tRecv, envelope.tSend)
        ended_ns = next((ns for ns in stamps if ns is not None), envelope.tA0)
        self.first_waits_ns[session] = ended_ns - begun_ns
        if has_window and envelope.is_emitted:
            del self._begun_ns[session]

    def _chunk(self, session: int, envelope: Envelope) -> None:
        if envelope.tEmit is not None and envelope.is_emitted:
            gap_ns = envelope.tEmit - self._chunk_ns.get(session, envelope.tEmit)
            self.gaps_ns[session] = max(gap_ns, self.gaps_ns.get(session, 0))
            self._chunk_ns[session] = envelope.tEmit


def gateway_ends(events: Iterable[LogEvent]) -> Iterator[str]:
    """Yields how the gateway of a run ended while that went on, and what its robots did then."""
    ends = [event.fields for event in events if event.name == GATEWAY]
    if ends:
        hows = Counter(shown(str(end.get(GATEWAY))) for end in ends)
        told = ", ".join(how if n == 1 else f"{how} {n} times" for how, n in hows.items())
        then = "held until the run had started it again"
        if ends[-1].get("again_in_s") is None:
            then = "hold until somebody starts another, as rank 0's output says"
        yield f"the gateway {told}: its robots {then}"


class GatewayTotals:
    """Adds up the lines of gateways, for the reader."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], RobotRequests] = {}
        #: Requests in work at the newest line, by generation as well: a gateway that was killed
        #: answers none of them.
        self._in_work: dict[tuple[int, str, str], int] = {}

    def add(self, generation: int, line: RobotRequests) -> None:
        self._in_work[generation, line.wire, line.robot] = line.unanswered
        line.unanswered = 0
        self._totals.setdefault((line.wire, line.robot), RobotRequests(line.wire, line.robot)).add(
            line
        )

    def by_robot(self) -> tuple[RobotRequests, ...]:
        """The sums in order of the lines, ``ROBOTS_MAX`` of each wire, and one of its others."""
        rows = {key: replace(row, errors={**row.errors}) for key, row in self._totals.items()}
        for (_, *key), n in self._in_work.items():
            rows[key[0], key[1]].unanswered += n
        found: list[RobotRequests] = []
        for wire in dict.fromkeys(row.wire for row in rows.values()):
            mine = [row for row in rows.values() if row.wire == wire]
            most = sorted(mine, key=lambda row: row.requests, reverse=True)[:ROBOTS_MAX]
            named = {row.robot for row in most}
            found += [row for row in mine if row.robot in named]
            if rest := [row for row in mine if row.robot not in named]:
                others = RobotRequests(wire, f"{len(rest)} others")
                for row in rest:
                    others.add(row)
                found.append(others)
        return tuple(found)


def _of_rows(value: object) -> list[int]:
    """Numbers of rows, a lone row's too; what is no number is 0."""
    listed = value if isinstance(value, list) else [value]
    return [found if type(found) is int else 0 for found in listed]


def requests_of(config: Json, ready: Iterable[Envelope]) -> Requests | None:
    """Counts over the envelopes of service; None where the input does not come on request.

    Args:
        config: of the run.
        ready: its envelopes of service, from a log that names the rows.
    """
    if not is_on_request(config):
        return None
    asked = [(e.asked, e.asked_ahead or 0) for e in ready if e.asked]
    return Requests(len(asked), sum(n for n, _ in asked), sum(ahead for _, ahead in asked))


def is_on_request(config: Json) -> bool:
    """True when the stream that ends the windows comes on request, whatever others do."""
    return _reference(config).get("max_request_hz") is not None


def serves_robots(config: Json) -> bool:
    """True where robots may come; a recording holds for nothing."""
    table = mapping_of(config.get("service"))
    return table.get("recording") is None and table.get("endpoint", "") is not None


def has_streaming_robots(config: Json) -> bool:
    """True where each chunk of a robot must last until the next, by what the run states.

    Until robots come that is all that is known: ``rate_hz`` is a sensor's that sends by itself, of
    robots beside a gateway, too, and ``max_request_hz`` that of robots which ask.
    """
    return serves_robots(config) and not is_on_request(config)


def asked_limits_ms(config: Json) -> dict[str, float]:
    """Times within which a gateway owes its clients the answer to each request, by setting."""
    return {
        f"gateway[{index}].timeout_ms": float(ms)
        for index, one in enumerate(_tables(config.get("gateway")))
        if one.get("answer") == "exact"
        and one.get("wire") != "lerobot"  # whose clients go on
        and isinstance(ms := one.get("timeout_ms"), int | float)
    }


def window_period_ns(config: Json) -> float:
    """The period below which no new windows come, by the stated rates; 0: nothing states one."""
    table = mapping_of(config.get("pipeline"))
    paced = str(table.get("pacing")).partition(":")[2]
    streams = [s for s in _tables(config.get("streams")) if paced and s.get("name") == paced]
    rates = [table.get("tick_hz"), *(s.get("rate_hz") for s in (_reference(config), *streams))]
    return max((1e9 / hz for hz in rates if isinstance(hz, int | float) and hz > 0), default=0.0)


def _reference(config: Json) -> Json:
    """The stream that ends the windows; {}: there is none."""
    streams = [stream for stream in _tables(config.get("streams")) if stream.get("name")]
    marked = [stream for stream in streams if stream.get("reference") is True]
    ends = marked or sorted(streams, key=_most_hz, reverse=True)
    return ends[0] if ends else {}


def streams_on_request(config: Json) -> set[str]:
    """Names of streams that come on request."""
    return {
        name
        for stream in _tables(config.get("streams"))
        if stream.get("max_request_hz") is not None and isinstance(name := stream.get("name"), str)
    }


def _most_hz(stream: Json) -> float:
    value = stream.get("rate_hz") or stream.get("max_request_hz")
    return float(value) if isinstance(value, int | float) else 0.0


def _tables(value: object) -> list[Json]:
    found = value if isinstance(value, list) else []
    return [table for table in found if isinstance(table, Mapping)]
