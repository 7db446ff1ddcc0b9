"""What watching costs a loop: metrics and scrapes on against off, in blocks of one live run.

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
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import metrics_in_runs
import torch
from bench_claims import Claim, ratio
from bench_runs import ending_cleanly, print_environment, print_targets, spread, write_json
from pipeline_in_process import NewestValues, PipelineInProcess, small_config

from ppstream.core.interpreter import set_switch_interval
from ppstream.launch.monitoring import Watching

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
                self.taken_ms.append(metrics_in_runs.scrape_ms(port))


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
        rounds = metrics_in_runs.in_turn(
            options.ranks, settings, rounds=options.rounds, rate=options.rate
        )
    scrape = spread([ms for one in rounds for ms in one.scraped.scrapes_ms])
    print(f"a scrape takes {scrape.p50:.1f} ms (p99 {scrape.p99:.1f}) while the loop runs")
    targets = metrics_in_runs.targets_of(rounds)
    print_targets(targets)
    write_json(
        options.json,
        mode,
        targets,
        claims=metrics_in_runs.claims_of(rounds),
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
    """What the median round's block took more, over its envelopes; of two, both together."""
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
    ports = metrics_in_runs.ports(folder)
    assert len(ports) == metrics_in_runs.RANKS, "a rank does not say where it can be asked"
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
    topology = {"world_size": metrics_in_runs.RANKS, "d_in": 2, "d_out": 2, "threads": "serial"}
    manifest = {"schema": "ppstream.log/1", "topology": topology}
    (folder / "run.json").write_text(json.dumps(manifest))
    run: Any = SimpleNamespace(run_id="bench", directory=folder)
    ranks = ((pipeline.rank0.log, pipeline.rank0.credits), (pipeline.policy_log, None))
    for rank, (log, ledger) in enumerate(ranks):
        Watching(config, run, log, stack, rank=rank, generation=0, credit_ledger=ledger)
        log.flush()


if __name__ == "__main__":
    sys.exit(main())
