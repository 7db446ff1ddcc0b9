"""Counts answers to 1, 2, 4 and 8 clients of openpi, by us and by a server of openpi's kind.

The client is the one that openpi publishes; each is a process of its own and asks again as soon as
it has its actions. The policy takes 40 ms, however many rows it is given. Two ranks serve it behind
a gateway, with ``pacing = "rows"`` and, for comparison, ``"sample"``; the other server answers one
request at a time, as openpi's own does. Observations are a state alone, and each answer is checked
to be of its own. Ratios are of one round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


from bench.cores import Cores
from bench.latency import rank_settings
from bench.peers import (
    ACCEPT,
    OPENPI,
    AskingProcess,
    PeerBench,
    listening,
    program,
    range_text,
    read_line,
)
from bench.peers_work import PAUSE_MS
from claimed_numbers import Claim, median_round, ratio
from real_runs import (
    RankPair,
    Target,
    ending_cleanly,
    print_environment,
    print_targets,
    spread,
    write_json,
)

COUNTS: Final = (1, 2, 4, 8)
ROWS, SAMPLE = "ppstream, rows", "ppstream, sample"
GATHER_MS: Final = 20.0
PACED: Final = {
    ROWS: ("pipeline.pacing=rows", f"pipeline.gather_ms={GATHER_MS}"),
    SAMPLE: ("pipeline.pacing=sample",),
}
SERVERS: Final = (*PACED, OPENPI)
WORK: Final = "pause"
SETTLE_S: Final = 1.0  # of each cell, left out
LEASE_MS: Final = 2000
MOST_HZ: Final = 100.0  # of one client
RUN_S: Final = 600.0
RATE_MIN: Final = 7.0  # times the requests of one client, at 8
P50_MAX: Final = 1.35  # times the p50 of one client, at 8
S: Final = 1e-9  # per ns


@dataclass(frozen=True, slots=True)
class ClientsCell:
    """One server with so many clients, in one round."""

    round: int
    server: str
    clients: int
    per_s: float
    p50_ms: float
    p99_ms: float
    n: int
    foreign: float  # cores


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    found: list[ClientsCell] = []
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        session = PeerBench(argparse.Namespace(peers=(OPENPI,)), Path(name))
        session.cpus = []  # nothing is pinned: nine processes and more share all there are
        mode = (
            f"{options.rounds} rounds of {options.seconds:g} s a cell; a policy of {PAUSE_MS:g} ms "
            f"for 1 to {max(COUNTS)} rows; gather_ms {GATHER_MS:g}; a state of 14 values"
        )
        print_environment(mode)
        if OPENPI in session.skipped:
            print(f"skipped: {session.skipped[OPENPI]}")
            return 0
        for number in range(options.rounds):
            turn = number % len(options.servers)
            for server in options.servers[turn:] + options.servers[:turn]:
                print(f"round {number + 1} of {options.rounds}: {server}", flush=True)
                with serving(session, server) as address:
                    for clients in options.clients:
                        cell = measure(session, address, clients, options.seconds)
                        found.append(ClientsCell(number, server, clients, *cell))
    targets, claims = judged(found)
    print_cells(found)
    print_targets(targets)
    rows = [asdict(cell) for cell in found]
    write_json(options.json, mode, targets, claims=claims, found=rows, versions=session.versions)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each cell")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


# ---- one cell -----------------------------------------------------------------------------------


def measure(
    session: PeerBench, address: str, clients: int, seconds: float
) -> tuple[float, float, float, int, float]:
    """Requests a second, p50 and p99 in ms, their number, and cores busy with anything else."""
    with ExitStack() as stack:
        robots = [
            stack.enter_context(AskingProcess(session, OPENPI, address, WORK))
            for _ in range(clients)
        ]
        cores = Cores()
        with ThreadPoolExecutor(clients) as threads:
            asked = [
                threads.submit(
                    robot.order,
                    measure="closed",
                    seconds=seconds + SETTLE_S,
                    mark=number / clients,  # within the limits of actions
                )
                for number, robot in enumerate(robots)
            ]
            answers: list[list[list[int]]] = [each.result() for each in asked]
        foreign = cores.foreign()
    begin_ns = max(each[0][0] for each in answers) + round(SETTLE_S / S)
    end_ns = min(each[-1][1] for each in answers)
    taken_ms = [
        (there_ns - asked_ns) * S * 1e3
        for each in answers
        for asked_ns, there_ns in each
        if begin_ns <= there_ns <= end_ns
    ]
    found = spread(taken_ms)
    return found.n / ((end_ns - begin_ns) * S), found.p50, found.p99, found.n, foreign


@contextmanager
def serving(session: PeerBench, server: str) -> Iterator[str]:
    """The server, while the block runs; its ADDRESS:PORT."""
    if server == OPENPI:
        module = ["-m", "bench.peers_servers", "openpi", "127.0.0.1", WORK]
        with program(session, OPENPI, module, ()) as process:
            yield read_line(process)
        return
    with tempfile.TemporaryDirectory(dir=session.folder) as name:
        folder = Path(name)
        with RankPair(folder, "bench", settings(folder, server)) as ranks:
            yield listening(ranks)
            ranks.stop()


def settings(folder: Path, server: str) -> list[str]:
    """Of the ranks, for the most clients."""
    found = rank_settings(f"unix://{folder}/robots", "serial", MOST_HZ, RUN_S)
    stream = f'{{name="state", dim=14, max_request_hz={MOST_HZ}, reference=true}}'
    gateway = '{wire="openpi", listen="127.0.0.1:0", timeout_ms=5000, map={state="state"}}'
    found += [f"streams=[{stream}]", f"gateway=[{gateway}]", f"batch.rows={max(COUNTS)}"]
    found += ["policy.target=bench.policies:build_pausing", "window.steps=1"]
    found += ["policy.options.steps=1", ACCEPT]
    found += [f"actions.lease_ms={LEASE_MS}", f"actions.dt_ms={LEASE_MS / 2}"]  # of one step
    return [*found, *PACED[server]]


# ---- what was found -----------------------------------------------------------------------------


def judged(found: Sequence[ClientsCell]) -> tuple[list[Target], list[Claim]]:
    """The most clients against one, at the server with rows, by the median of the rounds' ratios.

    Requests are judged upside down, since a target is a most: those of one client over a share.
    """
    cells = {(cell.round, cell.clients): cell for cell in found if cell.server == ROWS}
    most = max(COUNTS)
    pairs = [(cell, cells.get((number, most))) for (number, n), cell in cells.items() if n == 1]
    both = [(one, many) for one, many in pairs if many is not None]
    if not both:
        return [], []
    rates = [(many.per_s, one.per_s) for one, many in both]
    p50s = [(many.p50_ms, one.p50_ms) for one, many in both]
    targets, claims = [], []
    for what, found_pairs, limit in (
        (f"requests a second, 1 / {most} clients", [(b, a) for a, b in rates], 1 / RATE_MIN),
        (f"p50, {most} clients / 1", p50s, P50_MAX),
    ):
        reached = median_low([of / over for of, over in found_pairs])
        targets.append(Target(what, limit, reached))
        pair = median_round(found_pairs, lambda pair: pair[0] / pair[1])
        claims.append(ratio(what, *pair, reached))
    return targets, claims


def print_cells(found: Sequence[ClientsCell]) -> None:
    """Medians over the rounds with their range."""
    heads = ("clients", "requests/s", "x of 1", "p50 ms", "p99 ms", "foreign")
    print("\n" + f"{'server':18}" + "".join(f"{head:>22}" for head in heads))
    for server in dict.fromkeys(cell.server for cell in found):
        rows = [cell for cell in found if cell.server == server]
        ones = {cell.round: cell.per_s for cell in rows if cell.clients == 1}
        for clients in sorted({cell.clients for cell in rows}):
            here = [cell for cell in rows if cell.clients == clients]
            times = [cell.per_s / ones[cell.round] for cell in here if cell.round in ones]
            columns = (
                str(clients),
                range_text([cell.per_s for cell in here], 1),
                range_text(times, 2),
                range_text([cell.p50_ms for cell in here], 1),
                range_text([cell.p99_ms for cell in here], 1),
                range_text([cell.foreign for cell in here], 2),
            )
            print(f"{server:18}" + "".join(f"{column:>22}" for column in columns))


if __name__ == "__main__":
    sys.exit(main())
