"""``ppstream top``: what a run does now, on a terminal, from its metrics and the end of its log.

It reads: the loopback endpoints of the ranks (``metrics.port``), which the run's folder names, and
the log's last events. A run does not notice it beyond the requests.
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ppstream.analysis.log_reader import MANIFEST, log_files
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, LogError
from ppstream.core.phases import SERVING
from ppstream.observe.run_folder import EventLog, events_in
from ppstream.wire.http_answer import HTTP_OK, get_whole

PERIOD_S: Final = 1.0
ANSWER_LIMIT_S: Final = 2.0
ANSWER_BYTES_MAX: Final = 16 << 20  # a rank that tells more is none
HEAD_BYTES: Final = 65_536  # of a log: its first lines name the endpoint
TAIL_BYTES: Final = 4 << 20  # and its last ones the newest events
EVENTS: Final = 6
ASCII_NAME: Final = "ppstream.top"  # of the handler that writes them
BAR: Final = 20  # a row of two stages fits 80 columns
ASCII: Final = {"█": "#", "·": "-"}  # where the terminal's encoding has no other
#: Events that a person at a terminal waits for.
SHOWN: Final = frozenset(
    {
        "degraded",
        "epoch_cut",
        "fault",
        "gateway",
        "phase",
        "refused",
        "replica_lost",
        "sensor",
        "verdict",
    }
)

Labels = tuple[tuple[str, str], ...]


class Endpoint(NamedTuple):
    """Port of a rank's metrics on this host, and the run that logged it."""

    port: int
    run_id: str


@dataclass(frozen=True)
class RankMetrics:
    """Numbers of one rank at a moment; empty where the rank does not answer."""

    at_ns: int
    values: dict[tuple[str, Labels], float] = field(default_factory=dict)
    silence: str = "does not answer"  # said where it is empty

    def get(self, name: str, **labels: str) -> float:
        """One number, 0.0 where there is none."""
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)

    def label(self, name: str, key: str) -> str:
        """The label of the one series of ``name`` that is 1, as phases are told."""
        found = (dict(labels) for (n, labels), value in self.values.items() if n == name and value)
        return next((labels[key] for labels in found if key in labels), "")

    def series(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Every series of ``name``, with its labels."""
        return ((dict(labels), v) for (n, labels), v in self.values.items() if n == name)


def endpoints(folder: Path) -> dict[int, Endpoint]:
    """Endpoints of the ranks' metrics here, by rank, as the newest generation logged them.

    None of a run that starts: it times parts, say, or waits for a rank that loads a policy.

    Raises:
        ConfigError: no rank has logged one, or the logs cannot be read.
    """
    try:
        logs = log_files(folder)
    except LogError as error:
        raise ConfigError([f"{folder}: no run here; start one, or give its folder"]) from error
    newest: dict[int, tuple[int, Endpoint]] = {}
    for path, (rank, generation) in logs.items():
        with _reading(folder), path.open("rb") as file:
            lines = file.read(HEAD_BYTES)
        for event in events_in(lines):
            if event["name"] == "metrics":
                found = generation, Endpoint(int(event["port"]), str(event["run_id"]))
                newest[rank] = max(newest.get(rank, found), found)
    if not newest and not _will_serve(folder):
        raise ConfigError(
            [f"{folder}: no rank serves metrics; start the run with --set metrics.port=0"]
        )
    return {rank: endpoint for rank, (_, endpoint) in sorted(newest.items())}


def _will_serve(folder: Path) -> bool:
    """True of a run that has not ended and whose ranks are to serve metrics."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return bool(
            manifest["config"]["metrics"]["port"] is not None and not manifest["finished_utc"]
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def read(endpoint: Endpoint) -> RankMetrics:
    """Ask one rank; what is no metrics of its run is no answer."""
    port, run_id = endpoint
    try:
        url = f"http://127.0.0.1:{port}/metrics"
        answer = get_whole(url, {}, ANSWER_LIMIT_S, ANSWER_BYTES_MAX)
        text = answer.body.decode() if answer.status == HTTP_OK else ""
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except (OSError, HTTPException, ValueError, LookupError):  # the parser raises both
        return RankMetrics(now_ns())
    values = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
    found = RankMetrics(now_ns(), values)
    owner = found.label("ppstream_run_info", "run_id")
    if owner == run_id:
        return found
    whose = f" (port {port} belongs to run {owner})" if owner else ""
    return RankMetrics(found.at_ns, silence=RankMetrics.silence + whose)


class Events:
    """The newest events of rank 0's log, for people; without it, of the first rank's on this host.

    Raises:
        ConfigError: the log cannot be read.
        ValueError: the folder has no log.
    """

    def __init__(self, folder: Path) -> None:
        logs = log_files(folder)
        path = max(logs, key=lambda path: (-logs[path].rank, logs[path].generation))
        self._folder = folder
        with _reading(folder):
            self._log = EventLog(path, TAIL_BYTES)
        self._newest: deque[str] = deque(maxlen=EVENTS)

    def read(self) -> list[str]:
        """The newest events, the last one last. Raises as the constructor."""
        with _reading(self._folder):
            told = [event for event in self._log.read() if event["name"] in SHOWN]
        self._newest.extend(_words(event) for event in told)
        return [*self._newest]


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turns what the disk refuses into an error for people."""
    try:
        yield
    except OSError as error:
        text = f"{folder}: its logs cannot be read: {error.strerror}; was the run deleted?"
        raise ConfigError([text]) from error


def _words(event: dict[str, Any]) -> str:
    hidden = {"kind", "run_id", "generation", "t", "name"}
    name = event["name"]
    rest = [
        f"{key} {_word(value)}" for key, value in event.items() if key not in hidden and value != []
    ]
    return f"{name}: {', '.join(rest).removeprefix(f'{name} ')}"


def _word(value: object) -> object:
    if isinstance(value, list):
        return " and ".join(map(str, value))
    return f"{value:.2f}" if isinstance(value, float) else value


def picture(
    before: dict[int, RankMetrics], now: dict[int, RankMetrics], events: Sequence[str]
) -> Group:
    """One frame, from two readings of the ranks here, the second a moment after the first."""
    if not now:
        return Group(Text("the run starts; no rank serves metrics yet", style="bold"))
    rank = min(now)
    first = now[rank]
    verdict = first.label("ppstream_bringup_verdict", "verdict")
    phase = first.label("ppstream_phase", "phase")
    if phase in SERVING and verdict not in ("", "PASS"):
        verdict += ", accepted"  # else it would not serve
    facts = [
        first.label("ppstream_run_info", "name") or f"rank {rank} {first.silence}",
        phase,
        f"bring-up {verdict}" if verdict else "",
        first.label("ppstream_run_class", "class"),
        "no endpoint of rank 0 here" if rank else "",
    ]
    parts: list[RenderableType] = [Text(" · ".join(filter(None, facts)), style="bold")]
    table = Table.grid(padding=(0, 2))
    for name, text in _rows(before, now):
        table.add_row(Text(name, style="cyan"), text)
    parts += [Text(), table]
    if events:
        parts += [Text(), Text("\n".join(events), style="dim")]
    return Group(*parts)


def _rows(before: dict[int, RankMetrics], now: dict[int, RankMetrics]) -> Iterator[tuple[str, str]]:
    for rank, reading in now.items():
        yield f"rank {rank}", _place_text(before[rank], reading, "AC" if rank == 0 else "B")
    if 0 in now:
        yield from _rank0_rows(before[0], now[0])


def _rank0_rows(old: RankMetrics, new: RankMetrics) -> Iterator[tuple[str, str]]:
    yield (
        "rate",
        (
            f"{_rate(old, new, 'ppstream_envelopes_total'):.1f} envelopes/s, "
            f"{_rate(old, new, 'ppstream_chunks_sent_total'):.1f} chunks/s"
        ),
    )
    queues = ("d_in", "d_out")
    depths = (
        (q, *(new.get(f"ppstream_queue_{k}", queue=q) for k in ("depth", "bound"))) for q in queues
    )
    yield "queues", "   ".join(f"{q} {depth:.0f} of {bound:.0f}" for q, depth, bound in depths)
    yield "latency", _mean_text(old, new, "ppstream_latency_seconds")
    robots = new.get("ppstream_robots")
    age = _mean_text(old, new, "ppstream_action_age_seconds")
    lease_ms = 1000 * new.get("ppstream_lease_seconds")
    yield "age", f"{age}, lease {lease_ms:.0f} ms" if robots else "no robot"
    missed = new.get("ppstream_deadline_missed_total")
    yield "robots", f"{robots:.0f}   past their lease: {missed:.0f}"
    drops = {
        f"{labels['where']} {labels['reason']} {value:.0f}"
        for labels, value in new.series("ppstream_dropped_total")
        if value
    }
    yield "dropped", ", ".join(sorted(drops)) or "none"
    faults = {
        f"{' '.join(labels.values())} {value:.0f}"
        for labels, value in new.series("ppstream_faults_total")
        if value
    }
    yield "faults", ", ".join(sorted(faults)) or "none"


def _place_text(old: RankMetrics, new: RankMetrics, stages: str) -> str:
    if not new.values:
        return new.silence
    seconds = (new.at_ns - old.at_ns) / NS_PER_S
    name = "ppstream_stage_duration_seconds"
    busy_s = sum(
        new.get(f"{name}_sum", stage=stage) - old.get(f"{name}_sum", stage=stage)
        for stage in stages
    )
    share = min(1.0, max(0.0, busy_s / seconds)) if seconds > 0 and old.values else 0.0
    bar = "█" * round(share * BAR)
    recent = "ppstream_stage_duration_recent_seconds"
    times = "   ".join(
        f"{stage} {1000 * new.get(recent, stage=stage, quantile='0.5'):.2f}"
        f" p99 {1000 * new.get(recent, stage=stage, quantile='0.99'):.1f} ms"
        for stage in stages
    )
    return f"{bar:·<{BAR}} {share:4.0%}   {times}"


def _rate(old: RankMetrics, new: RankMetrics, name: str) -> float:
    seconds = (new.at_ns - old.at_ns) / NS_PER_S
    return max(0.0, new.get(name) - old.get(name)) / seconds if seconds > 0 and old.values else 0.0


def _mean_text(old: RankMetrics, new: RankMetrics, name: str) -> str:
    """Mean of what came between the two readings."""
    count = new.get(f"{name}_count") - old.get(f"{name}_count")
    total = new.get(f"{name}_sum") - old.get(f"{name}_sum")
    return f"{1000 * total / count:.1f} ms" if count > 0 and old.values else "none now"


def main(argv: Sequence[str] | None = None) -> int:
    """Show the run until Ctrl-C, or once; returns the exit code."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(ASCII_NAME, _in_ascii)
        sys.stdout.reconfigure(errors=ASCII_NAME)
    console = Console(highlight=False)
    try:
        pictures = _pictures(args.logs.resolve())
        if args.once or not console.is_terminal or console.is_dumb_terminal:
            answers, shown = next(pictures)
            console.print(shown, soft_wrap=True)
            return 0 if answers else 1
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for _, shown in pictures:
                live.update(shown, refresh=True)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        pass
    return 0


def _pictures(folder: Path) -> Iterator[tuple[bool, Group]]:
    """Yields a frame for each period, and True where the first rank answered.

    Ranks that begin to serve later, or are started anew, are asked from then on.

    Raises:
        ConfigError: as ``endpoints`` and ``Events``.
    """
    ranks: dict[int, Endpoint] = {}
    before: dict[int, RankMetrics] = {}
    events: Events | None = None
    while True:
        if (found := endpoints(folder)) != ranks:
            ranks, events = found, Events(folder)
            before = {rank: read(endpoint) for rank, endpoint in ranks.items()}
        time.sleep(PERIOD_S)
        now = {rank: read(endpoint) for rank, endpoint in ranks.items()}
        answers = bool(now) and bool(now[min(now)].values)
        yield answers, picture(before, now, events.read() if events else [])
        before = now


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Handles what the terminal's encoding has not: a codec's error handler."""
    assert isinstance(error, UnicodeEncodeError)
    refused = error.object[error.start : error.end]
    return "".join(ASCII.get(letter, "?") for letter in refused), error.end


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream top",
        description="What a run does now: phase, verdict, busy shares, queues, ages, drops, "
        "events. The run needs metrics.port (0 takes free ones).",
    )
    parser.add_argument(
        "logs", type=Path, nargs="?", default=Path("logs/latest"), help="the run's folder"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    return parser


if __name__ == "__main__":
    sys.exit(main())
