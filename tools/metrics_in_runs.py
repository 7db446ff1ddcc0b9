"""What watching costs two real ranks: whole bring-ups in turn, with metrics, scrapes, or neither.

For loops that need processes of their own, as those of two GPUs do. The period is the report's,
the CPU time what the kernel booked for each process while its envelopes ran. Not a benchmark.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from bench_claims import Claim, ratio
from bench_runs import BRING_UP_ONLY, MEASURED, RankPair, Target

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run

RANKS: Final = 2
LOOK_S: Final = 0.05
SCRAPE_LIMIT_S: Final = 10.0
COST_MAX: Final = 0.01  # of the period
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class Watched(NamedTuple):
    """One bring-up; times in microseconds."""

    period_us: float
    p99_us: float
    cpu_us: tuple[float, float]  # of rank 0 and of the policy rank, for each envelope
    envelopes: int
    scrapes_ms: list[float]


class Round(NamedTuple):
    """One bring-up each way."""

    off: Watched
    tallied: Watched  # metrics on, nobody asks
    scraped: Watched


#: What is switched on, and what it is called.
WAYS: Final = {"tallied": "tallies alone", "scraped": "tallies and scrapes"}


class Onlooker:
    """Until it is closed: books the CPU time of both ranks and, at ``rate`` hertz, asks them."""

    def __init__(self, ranks: RankPair, rate: float) -> None:
        self.taken_ms: list[float] = []
        self.cpu_s: list[tuple[float, ...]] = []  # time, and of each rank
        self._ranks, self._rate = ranks, rate
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._ended.wait(LOOK_S):
            pids = [process.pid for process in self._ranks.processes]
            try:
                self.cpu_s.append((time.monotonic(), *map(_cpu_s, pids)))
            except OSError:
                return  # a rank has left
            if self._rate and time.monotonic() >= next_s:
                next_s = time.monotonic() + 1 / self._rate
                for port in ports(self._ranks.directory):
                    self._ask(port)

    def _ask(self, port: int) -> None:
        with suppress(OSError):  # the rank is leaving: what it answered before counts
            self.taken_ms.append(scrape_ms(port))


def bring_up(
    config: str, settings: Sequence[str], *, has_metrics: bool = True, rate: float = 0.0
) -> Watched:
    """One bring-up of ``config``, with ``rate`` scrapes of both ranks a second.

    Exits with the ranks' output when there is nothing to judge, or nobody could be asked.
    """
    metrics = ("metrics.port=0",) if has_metrics else ("metrics.port=none",)
    with tempfile.TemporaryDirectory(prefix="ppstream-bench-") as folder:
        with RankPair(Path(folder), config, (*BRING_UP_ONLY, *settings, *metrics)) as ranks:
            onlooker = Onlooker(ranks, rate)
            try:
                code = ranks.wait()
            finally:
                onlooker.close()
        found = judge(read_run(ranks.directory)) if code in MEASURED else None
        if found is None or found.primary is None or (rate and not onlooker.taken_ms):
            raise SystemExit(f"rank 0 ended with {code}:\n{ranks.output()}")
    emitted = found.window.emitted
    first_s, last_s = ((emitted[end].tEmit or 0) * 1e-9 for end in (0, -1))
    at_s, *spent_s = np.array(onlooker.cpu_s).T
    cpu_us = [
        float(np.interp(last_s, at_s, each) - np.interp(first_s, at_s, each)) / len(emitted) * 1e6
        for each in spent_s
    ]
    periods_us = [ns * 1e-3 for segment in found.window.segments for ns in segment.periods_ns]
    return Watched(
        found.primary.period_ns * 1e-3,
        float(np.percentile(periods_us, 99)),
        (cpu_us[0], cpu_us[1]),
        len(emitted),
        onlooker.taken_ms,
    )


def _cpu_s(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def scrape_ms(port: int) -> float:
    """How long one page of metrics takes.

    Raises:
        OSError: the rank does not answer.
    """
    began_ns = time.monotonic_ns()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_LIMIT_S) as page:
        page.read()
    return (time.monotonic_ns() - began_ns) / 1e6


def ports(directory: Path) -> list[int]:
    """Where the ranks of a run can be asked; those that say so already."""
    found = []
    for rank in range(RANKS):
        path = directory / f"rank{rank}.gen0.jsonl"
        for line in path.read_text().split("\n")[:-1][:20] if path.exists() else ():
            event = json.loads(line)
            if event.get("name") == "metrics":
                found.append(int(event["port"]))
    return found


def in_turn(config: str, settings: Sequence[str], *, rounds: int, rate: float) -> list[Round]:
    """Every other round goes backwards through its ways; each bring-up is printed."""
    found = []
    print(f"{'':8} {'period us':>10} {'p99':>8} {'CPU us':>7} {'':>7} {'n':>6} {'scrapes':>8}")
    asked = {"off": 0.0, "tallied": 0.0, "scraped": rate}
    for number in range(rounds):
        ways = list(asked)[:: -1 if number % 2 else 1]
        one = {}
        for way in ways:
            has_metrics = way != "off"
            one[way] = bring_up(config, settings, has_metrics=has_metrics, rate=asked[way])
            print(
                f"{way:8} {one[way].period_us:10.1f} {one[way].p99_us:8.1f} "
                f"{one[way].cpu_us[0]:7.1f} {one[way].cpu_us[1]:7.1f} {one[way].envelopes:6} "
                f"{len(one[way].scrapes_ms):8}",
                flush=True,
            )
        found.append(Round(**one))
    return found


def share(one: Round, way: str) -> float:
    """Of the period, that ``way`` adds."""
    watched: Watched = getattr(one, way)
    return watched.period_us / one.off.period_us - 1


def cost(rounds: Sequence[Round], way: str) -> float:
    """The median of the rounds."""
    return median(share(one, way) for one in rounds)


def targets_of(rounds: Sequence[Round]) -> list[Target]:
    return [
        Target(f"share of the period that {name} add", COST_MAX, cost(rounds, way))
        for way, name in WAYS.items()
    ]


def claims_of(rounds: Sequence[Round]) -> list[Claim]:
    """The middle round's periods, or of two middle ones their mean, give the cost."""
    claims = []
    for way, name in WAYS.items():
        ordered = sorted(share(one, way) for one in rounds)
        middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
        what = f"share of the period that {name} add"
        claims.append(ratio(what, sum(middle), len(middle), cost(rounds, way)))
    return claims
