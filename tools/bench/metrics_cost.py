"""Cost of metrics and scrapes for a loop, on against off, in blocks of one live run.

Both ranks of a saturated pipeline run in this process, with stages that do no work, so whatever
watching adds is added to every envelope. Off: no watcher, no scrape. Tallied: both ranks count.
Scraped: both are asked, too, by a thread at the given rate (Prometheus asks every 5 to 15 s; the
default here is twice a second). Every other round goes backwards. The price is the median of what a
block takes more than its round's block with nothing on, in time and in CPU time of the process,
which other users of the machine change less; it contains the client's.

``--ranks bench_gpus`` measures real ranks instead, of any configuration: whole bring-ups in turn,
and the share of the period that watching adds, which may be 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

import numpy as np
import torch
from claimed_numbers import Claim, ratio
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from real_runs import (
    BRING_UP_ONLY,
    MEASURED,
    RankPair,
    Target,
    ending_cleanly,
    print_environment,
    print_targets,
    spread,
    write_json,
)

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.core.interpreter import set_switch_interval
from ppstream.launch.monitoring import Monitoring

RANKS: Final = 2
LOOK_S: Final = 0.05
SCRAPE_LIMIT_S: Final = 10.0
COST_MAX: Final = 0.01  # of the period
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class BringUpCost(NamedTuple):
    """One bring-up; times in microseconds."""

    period_us: float
    p99_us: float
    cpu_us: tuple[float, float]  # of rank 0 and of the policy rank, for each envelope
    envelopes: int
    scrapes_ms: list[float]


class Round(NamedTuple):
    """One bring-up each way."""

    off: BringUpCost
    tallied: BringUpCost  # metrics on, nobody asks
    scraped: BringUpCost


#: What is switched on, and what it is called.
WATCHED_WAYS: Final = {"tallied": "tallies alone", "scraped": "tallies and scrapes"}


class Onlooker:
    """Until it is closed: records the CPU time of both ranks and, at ``rate`` hertz, asks them."""

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
                for port in ports_of(self._ranks.directory):
                    self._ask(port)

    def _ask(self, port: int) -> None:
        with suppress(OSError):  # the rank is leaving: what it answered before counts
            self.taken_ms.append(scrape_ms(port))


def bring_up(
    config: str, settings: Sequence[str], *, has_metrics: bool = True, rate: float = 0.0
) -> BringUpCost:
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
    return BringUpCost(
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
    """Measures how long one page of metrics takes.

    Raises:
        OSError: the rank does not answer.
    """
    began_ns = time.monotonic_ns()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_LIMIT_S) as page:
        page.read()
    return (time.monotonic_ns() - began_ns) / 1e6


def ports_of(directory: Path) -> list[int]:
    """Returns where the ranks of a run can be asked; those that have published it."""
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
    watched: BringUpCost = getattr(one, way)
    return watched.period_us / one.off.period_us - 1


def cost(rounds: Sequence[Round], way: str) -> float:
    """The median of the rounds."""
    return median(share(one, way) for one in rounds)


def targets_of(rounds: Sequence[Round]) -> list[Target]:
    return [
        Target(f"share of the period that {name} add", COST_MAX, cost(rounds, way))
        for way, name in WATCHED_WAYS.items()
    ]


def claims_of_runs(rounds: Sequence[Round]) -> list[Claim]:
    """The middle round's periods, or of two middle ones their mean, give the cost."""
    claims = []
    for way, name in WATCHED_WAYS.items():
        ordered = sorted(share(one, way) for one in rounds)
        middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
        what = f"share of the period that {name} add"
        claims.append(ratio(what, sum(middle), len(middle), cost(rounds, way)))
    return claims


US: Final = 1e-3  # per ns
WARM: Final = 200  # envelopes
RUN_ENVELOPES: Final = 4000  # of one bring-up: seconds, so that scrapes fall into it
WAYS: Final = ("off", "tallied", "scraped")
CLOCKS: Final = {"time": time.monotonic_ns, "CPU": time.process_time_ns}


class Scraper:
    """Asks both ranks ``rate`` times a second while it is on."""

    def __init__(self, ports: Sequence[int], rate: float) -> None:
        self.on = threading.Event()
        self.taken_ms: list[float] = []
        self._ports = ports
        self._rate = rate
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(1 / self._rate):
            if not self.on.is_set():
                continue
            for port in self._ports:
                self.taken_ms.append(scrape_ms(port))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=20, help="each way")
    parser.add_argument("--block", type=int, default=500, help="envelopes of a block")
    parser.add_argument("--rate", type=float, default=2.0, help="scrapes a second, of both ranks")
    parser.add_argument("--ranks", metavar="CONFIG", help="two real ranks, in whole bring-ups")
    parser.add_argument("--rounds", type=int, default=4, help="of them, each way; with --ranks")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="settings", help="of them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.ranks is not None:
        return of_ranks(options)
    torch.set_num_threads(1)
    set_switch_interval()
    mode = f"both ranks in one process, blocks of {options.block} envelopes in turn"
    print_environment(mode)
    with ending_cleanly(), ExitStack() as stack:
        blocks, scrapes_ms = measure(stack, options)
    spreads = {name: spread(values) for name, values in blocks.items()}
    print(f"{'us an envelope':24} {'p50':>8} {'p99':>8} {'max':>8} {'n':>5}")
    for name, found in spreads.items():
        print(f"{name:24} {found.p50:8.1f} {found.p99:8.1f} {found.max:8.1f} {found.n:5}")
    added_us = {
        f"{clock}, {way}": added(blocks, clock, way) for clock in CLOCKS for way in WAYS[1:]
    }
    scrape = spread(scrapes_ms or [0.0])
    print(
        f"tallies add {added_us['CPU, tallied']:.1f} us of CPU time and "
        f"{added_us['time, tallied']:+.1f} us to an envelope without any stage work; with "
        f"{options.rate:g} scrapes a second of both ranks {added_us['CPU, scraped']:.1f} us and "
        f"{added_us['time, scraped']:+.1f} us"
    )
    print(f"a scrape takes {scrape.p50:.1f} ms (p99 {scrape.p99:.1f}) while the loop runs")
    write_json(
        options.json,
        mode,
        (),
        claims=claims_of(blocks, added_us, options.block),
        blocks_us={name: asdict(found) for name, found in spreads.items()},
        added_us=added_us,
        scrape_ms=asdict(scrape),
    )
    return 0


def of_ranks(options: argparse.Namespace) -> int:
    mode = f"two ranks of {options.ranks} {' '.join(options.settings)}".rstrip()
    print_environment(mode)
    settings = (f"bringup.envelopes={RUN_ENVELOPES}", *options.settings)
    with ending_cleanly():
        rounds = in_turn(options.ranks, settings, rounds=options.rounds, rate=options.rate)
    scrape = spread([ms for one in rounds for ms in one.scraped.scrapes_ms])
    print(f"a scrape takes {scrape.p50:.1f} ms (p99 {scrape.p99:.1f}) while the loop runs")
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(
        options.json,
        mode,
        targets,
        claims=claims_of_runs(rounds),
        rounds=[{way: each._asdict() for way, each in one._asdict().items()} for one in rounds],
        scrape_ms=asdict(scrape),
    )
    return 0


def added(blocks: dict[str, list[float]], clock: str, way: str) -> float:
    return median(differences(blocks, clock, way))


def differences(blocks: dict[str, list[float]], clock: str, way: str) -> list[float]:
    """``way`` less off of each round of blocks, in µs an envelope."""
    pairs = zip(blocks[f"{clock}, {way}"], blocks[f"{clock}, off"], strict=True)
    return [on - off for on, off in pairs]


def claims_of(
    blocks: dict[str, list[float]], added_us: dict[str, float], envelopes: int
) -> list[Claim]:
    """Claims what the median round's block took more, over its envelopes; of two, both together."""
    claims = []
    for name, claimed in added_us.items():
        clock, way = name.split(", ")
        ordered = sorted(differences(blocks, clock, way))
        middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
        more_us = sum(difference * envelopes for difference in middle)
        what = f"{clock} that being {way} adds to an envelope, us"
        claims.append(ratio(what, more_us, len(middle) * envelopes, claimed))
    return claims


def measure(
    stack: ExitStack, options: argparse.Namespace
) -> tuple[dict[str, list[float]], list[float]]:
    """Mean µs per envelope of each block by clock, and what scrapes took in ms."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppstream-bench-")))
    config = small_config("metrics.port=0")
    pipeline = stack.enter_context(PipelineInProcess(config, NewestValues(), folder))
    logs = (pipeline.rank0.log, pipeline.policy_log)
    watch(config, pipeline, folder, stack)
    ports = ports_of(folder)
    assert len(ports) == RANKS, "a rank does not say where it can be asked"
    scraper = Scraper(ports, options.rate)
    stack.callback(scraper.close)
    watchers = [list(log.watchers) for log in logs]
    pipeline.saturate()
    pipeline.rank0.run(WARM)
    found: dict[str, list[float]] = {f"{c}, {way}": [] for c in CLOCKS for way in WAYS}
    for number in range(options.blocks):
        for way in WAYS[:: -1 if number % 2 else 1]:
            for log, watching in zip(logs, watchers, strict=True):
                log.flush()
                log.watchers[:] = [] if way == "off" else watching
            with scraping(scraper) if way == "scraped" else ExitStack():
                began_ns = [clock() for clock in CLOCKS.values()]
                pipeline.rank0.run(options.block)
                for began, (clock, read) in zip(began_ns, CLOCKS.items(), strict=True):
                    found[f"{clock}, {way}"].append((read() - began) / options.block * US)
    return found, scraper.taken_ms


@contextmanager
def scraping(scraper: Scraper) -> Iterator[None]:
    scraper.on.set()
    yield
    scraper.on.clear()


def watch(config: Any, pipeline: PipelineInProcess, folder: Path, stack: ExitStack) -> None:
    """Put onto both ranks what launch/run_rank0.py and launch/run_policy_rank.py put there."""
    topology = {"world_size": RANKS, "d_in": 2, "d_out": 2, "threads": "serial"}
    manifest = {"schema": "ppstream.log/1", "topology": topology}
    (folder / "run.json").write_text(json.dumps(manifest))
    run: Any = SimpleNamespace(run_id="bench", directory=folder)
    ranks = ((pipeline.rank0.log, pipeline.rank0.credits), (pipeline.policy_log, None))
    for rank, (log, ledger) in enumerate(ranks):
        Monitoring(config, run, log, stack, rank=rank, generation=0, credit_ledger=ledger)
        log.flush()


if __name__ == "__main__":
    sys.exit(main())
