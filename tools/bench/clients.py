"""Counts answers to 1, 2, 4 and 8 clients of openpi, by us and by a server of openpi's kind.

The client is the one that openpi publishes; each is a process of its own and asks again as soon as
it has its actions. The policy takes 40 ms, however many rows it is given. Two ranks serve it behind
a gateway, with ``pacing = "rows"`` and, for comparison, ``"sample"``; the other server answers one
request at a time, as openpi's own does. Observations are a state alone, and each answer is checked
to be of its own. Ratios are of one round.

``--work frames`` adds three cameras of 224 x 224 to the state, before a policy of 3 ms: what a
gateway does with 450 KB a request. ``rows, 1 process`` is ours with ``gateway.processes = 1``.

``--work act`` and ``vla`` take a GPU, for both ranks or the other server: a policy of ACT's size
with two cameras of 224 x 224, or of pi0's with three. ``over the policy`` is p50 less the policy's
own time on the device, for one row and with nothing around it, in the same run; the native client
stands beside the gateway there. Of one client alone the parts of its way are read from the run's
log (one host: one clock), and so is with how many rows the policy was called. ``native rows`` is
our own client in rows, past the gateway. ``one rank`` runs all stages in turn, without a link,
which is what ``ppstream run`` does on one GPU; ``rows, one rank`` is that behind the gateway.
``openpi, bare`` is the other server with a pause of the policy's own time, on CPUs of none, instead
of the policy: what a request takes over that is the client's and its wire's.

``--keep-freed`` has glibc keep what openpi's client frees. It gives large messages' memory back by
default, and whether it does can hang on the length of a path: compare runs of equal ``faults``, the
page faults a request of the clients.

``--work vla --gpus N`` cuts that policy over N GPUs, as ``vla_2`` to ``vla_4`` do; ``--work tiny``
is the same on CPUs, with the policy of ``vla_tiny`` on its three ranks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


from bench.cores import Cores
from bench.latency import rank_settings, served_lines
from bench.peers import (
    ACCEPT,
    OPENPI,
    TWO,
    AskingProcess,
    NotServed,
    PeerBench,
    listening,
    program,
    range_text,
    read_line,
)
from bench.peers_work import CAMERAS_OF, HORIZON, MEAN, ON_GPU, PAUSES_MS, SIDE, SIDES, STD
from claimed_numbers import Claim, median_round, ratio
from real_runs import (
    RankPair,
    Target,
    ending_cleanly,
    environment_with_sources,
    print_environment,
    print_targets,
    spread,
    write_json,
)

COUNTS: Final = (1, 2, 4, 8)
ROWS, SAMPLE = "ppstream, rows", "ppstream, sample"
NATIVE: Final = "ppstream, native rows"
ONE: Final = "ppstream, one rank"
ALONE: Final = "ppstream, rows, 1 process"
ROWS_ONE: Final = "ppstream, rows, one rank"
BARE: Final = "openpi, bare"
#: Half a policy's time, about.
GATHER_MS: Final = {"pause": 20.0, "frames": 3.0, "tiny": 10.0, "act": 2.0, "vla": 10.0}
PACED: Final = {
    ROWS: ("pipeline.pacing=rows",),
    ALONE: ("pipeline.pacing=rows", "gateway.0.processes=1"),
    ROWS_ONE: ("pipeline.pacing=rows",),
    SAMPLE: ("pipeline.pacing=sample",),
    TWO: ("pipeline.pacing=sample",),
    NATIVE: ("pipeline.pacing=rows",),
    ONE: ("pipeline.pacing=sample",),
}
LONE: Final = (TWO, ONE)  # have one row
ON_UNIX: Final = (*LONE, NATIVE)  # asked by our own client, past the gateway
SERVERS: Final = (*PACED, OPENPI, BARE)
ON_CPU: Final = (ROWS, SAMPLE, OPENPI)
WORKS: Final = (*PAUSES_MS, "tiny", *ON_GPU)
#: Most ms of one client's p50 over the policy's own time.
OVER_MAX_MS: Final = {ROWS: 1.0, ROWS_ONE: 1.0, TWO: 0.4, ONE: 0.4}
BATCH: Final = dict.fromkeys(WORKS, max(COUNTS)) | {"tiny": 4, "vla": 4}  # rows
SETTLE_S: Final = 1.0  # of each cell, left out
LEASE_MS: Final = 2000
MOST_HZ: Final = 250.0  # of one client; rank 0 takes some four times as many
RUN_S: Final = 600.0
READY_LIMIT_S: Final = 240.0  # of a policy of billions of parameters, too
TWO_RANKS: Final = 2
WORDS: Final = {
    "pause": "a policy of 40 ms for 1 to 8 rows; a state of 14 values",
    "frames": "a policy of 3 ms for 1 to 8 rows; three cameras and a state of 14 values",
    "tiny": "vla_tiny's policy on three ranks; two cameras and a state of 14 values",
    "act": "a policy of ACT's size, two cameras and a state of 14 values",
    "vla": "a policy of pi0's size, three cameras and a state of 14 values",
}
RATE_MIN: Final = 7.0  # times the requests of one client, at 8
P50_MAX: Final = 1.35  # times the p50 of one client, at 8
S: Final = 1e-9  # per ns
KEEP_FREED: Final = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "33554432")


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
    faults: float  # page faults a request, of the clients
    over_ms: float | None = None  # p50 over the policy's own time


@dataclass(slots=True)
class ServerLog:
    """A server that was measured; of one of ours its log is read at the end.

    Attributes:
        alone: when a client that was alone asked, and when it had the answer, in ns.
        cells: how many clients asked from when to when, in ns.
        parts_ms: durations by ``PARTS`` of the ways between; of a chain none.
        rows: calls of the policy in service, by the number of rows.
        ages_ms: of actions when rank 0 emits them, by the number of clients.
        envelopes_ms: durations by those of ``PARTS`` that rank 0 stamps, by the number of clients.
        told_ms: durations by ``TOLD`` as replies tell them, by the number of clients.
    """

    address: str
    alone: list[tuple[int, int]] = field(default_factory=list)
    cells: list[tuple[int, int, int]] = field(default_factory=list)
    parts_ms: dict[str, list[float]] = field(default_factory=dict)
    rows: Counter[int] = field(default_factory=Counter)
    ages_ms: dict[int, list[float]] = field(default_factory=dict)
    envelopes_ms: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    told_ms: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def cells_of(self) -> set[int]:
        """Numbers of clients that were measured."""
        return {clients for clients, _, _ in self.cells}


#: Parts of a request's time by what its reply tells, with ``actions.provenance``.
TOLD: Final = ("client and websocket", "gateway to rank 0 and back", "rank 0 and links", "policy")

#: Between which stamps the parts of a lone client's way lie, in their order.
PARTS: Final = {
    "to rank 0's ring": ("asked", "tRx"),
    "to A": ("tRx", "tA0"),
    "A": ("tA0", "tA1"),
    "to B": ("tA1", "tB0"),
    "B": ("tB0", "tB1"),
    "to rank 0": ("tB1", "tRecv"),
    "C": ("tRecv", "tEmit"),
    "picked up": ("tEmit", "tPick"),
    "to the client": ("tPick", "there"),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    found: list[ClientsCell] = []
    logs: dict[str, list[ServerLog]] = {}
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        session = PeerBench(argparse.Namespace(peers=(OPENPI,)), Path(name))
        session.cpus = []  # nothing is pinned: nine processes and more share all there are
        session.environment = KEEP_FREED if options.keep_freed else {}
        mode = (
            f"{options.rounds} rounds of {options.seconds:g} s a cell; {WORDS[options.work]}; "
            f"gather_ms {GATHER_MS[options.work]:g}"
        )
        mode = "; ".join([mode, *["freed memory kept"] * options.keep_freed, *options.settings])
        print_environment(mode)
        alone_ms = options.alone_ms = policy_alone_ms(options.work)
        if OPENPI in session.skipped:
            print(f"skipped: {session.skipped[OPENPI]}")
            return 0
        for number in range(options.rounds):
            turn = number % len(options.servers)
            for server in options.servers[turn:] + options.servers[:turn]:
                print(f"round {number + 1} of {options.rounds}: {server}", flush=True)
                with serving(session, server, options) as served:
                    logs.setdefault(server, []).append(served)
                    for clients in (1,) if server in LONE else options.clients:
                        cell = measure(session, server, served, clients, options)
                        shown = f"{cell[0]:.1f} requests/s, p50 {cell[1]:.2f}, p99 {cell[2]:.2f} ms"
                        print(f"  {clients} at once: {shown}", flush=True)
                        over = None if alone_ms is None else cell[1] - alone_ms
                        found.append(ClientsCell(number, server, clients, *cell, over))
    (targets, claims), (more, also) = judged(found), judged(found, ROWS_ONE)
    targets, claims = [*targets, *more, *over_the_policy(found)], claims + also
    print_cells(found)
    print_logs(logs)
    print_targets(targets)
    rows = [asdict(cell) for cell in found]
    write_json(options.json, mode, targets, claims=claims, found=rows, versions=session.versions)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", choices=WORKS, default="pause")
    parser.add_argument("--clients", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(ON_CPU))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each cell")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep-freed", action="store_true", help="memory of openpi's client")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 3, 4), default=1, help="of --work vla")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


# ---- one cell -----------------------------------------------------------------------------------


def measure(
    session: PeerBench, server: str, served: ServerLog, clients: int, options: argparse.Namespace
) -> tuple[float, float, float, int, float, float]:
    """Numbers of a cell, from ``per_s`` to ``faults``."""
    peer = TWO if server in ON_UNIX else OPENPI
    with ExitStack() as stack:
        robots = [
            stack.enter_context(AskingProcess(session, peer, served.address, options.work))
            for _ in range(clients)
        ]
        cores, before = Cores(), sum(robot.page_faults() for robot in robots)
        with ThreadPoolExecutor(clients) as threads:
            asked = [
                threads.submit(
                    robot.order,
                    measure="closed",
                    seconds=options.seconds + SETTLE_S,
                    mark=number / clients,  # within the limits of actions
                )
                for number, robot in enumerate(robots)
            ]
            answers: list[list[tuple[int, int, dict[str, float]]]] = [
                each.result() for each in asked
            ]
        foreign = cores.foreign()
        faults = sum(robot.page_faults() for robot in robots) - before
    begin_ns = max(each[0][0] for each in answers) + round(SETTLE_S / S)
    end_ns = min(each[-1][1] for each in answers)
    taken_ms = [
        (there_ns - asked_ns) * S * 1e3
        for each in answers
        for asked_ns, there_ns, _ in each
        if begin_ns <= there_ns <= end_ns
    ]
    for asked_ns, there_ns, timing in (answer for each in answers for answer in each):
        if begin_ns <= there_ns <= end_ns and "policy_ms" in timing:
            infer_ms, wait_ms, policy_ms = (timing[f"{k}_ms"] for k in ("infer", "wait", "policy"))
            client_ms = (there_ns - asked_ns) * S * 1e3 - infer_ms
            spent = (client_ms, infer_ms - wait_ms - policy_ms, wait_ms, policy_ms)
            parts = served.told_ms.setdefault(clients, {})
            for part, ms in zip(TOLD, spent, strict=True):
                parts.setdefault(part, []).append(ms)
    if clients == 1:
        served.alone += [(asked, there) for asked, there, _ in answers[0] if asked >= begin_ns]
    served.cells.append((clients, begin_ns, end_ns))
    found = spread(taken_ms)
    per_s, requests = found.n / ((end_ns - begin_ns) * S), sum(map(len, answers))
    return per_s, found.p50, found.p99, found.n, foreign, faults / requests


@contextmanager
def serving(session: PeerBench, server: str, options: argparse.Namespace) -> Iterator[ServerLog]:
    """The server, while the block runs; settings on top are for ours."""
    work: str = options.work
    if server in {OPENPI, BARE}:
        behind = work if server == OPENPI else str(options.alone_ms or 0)
        module = ["-m", "bench.peers_servers", "openpi", "127.0.0.1", behind]
        with program(session, OPENPI, module, ()) as process:
            yield ServerLog(read_line(process))
        return
    with tempfile.TemporaryDirectory(dir=session.folder) as name:
        folder = Path(name)
        asked = [*settings(folder, server, work, options.gpus), *options.settings]
        world_size = 1 if server in (ONE, ROWS_ONE) else ranks_of(work, options.gpus)
        with RankPair(folder, "bench", asked, world_size=world_size) as ranks:
            address = listening(ranks, READY_LIMIT_S)
            served = ServerLog(f"unix://{folder}/robots" if server in ON_UNIX else address)
            try:
                yield served
            except NotServed as error:  # a client had no answer: what the run says of it
                raise SystemExit(f"{server}: {error}\n{ranks.output()}") from None
            ranks.stop()
            read_log(served, ranks.directory, is_chain=world_size > TWO_RANKS)


def ranks_of(work: str, gpus: int) -> int:
    """Of a run: rank 0 and the policy's."""
    return 3 if work == "tiny" else max(TWO_RANKS, gpus if work == "vla" else 1)


def read_log(served: ServerLog, directory: Path, *, is_chain: bool) -> None:
    """Fill in what the ranks' log says; a lone client's answer is the one envelope within."""
    lines = [line for line in served_lines(directory) if line.get("drop") is None]
    served.rows.update(line["rows"] for line in lines if line.get("rows") is not None)
    for clients, begin_ns, end_ns in served.cells:
        served.ages_ms.setdefault(clients, []).extend(
            line["age_rank0_ns"] * S * 1e3
            for line in lines
            if begin_ns <= line["tEmit"] <= end_ns and line.get("age_rank0_ns") is not None
        )
        found = served.envelopes_ms.setdefault(clients, {})
        for line in lines if not is_chain else ():
            if begin_ns <= line["tEmit"] <= end_ns:
                add_parts(found, line)
    if is_chain:
        return
    lines.sort(key=lambda line: line["tRx"])
    received = [line["tRx"] for line in lines]
    for asked, there in served.alone:
        at = bisect_left(received, asked)
        if at == len(lines) or received[at] > there:
            continue
        line = lines[at] | {"asked": asked, "there": there}
        line["tPick"] = line.get("tPick") or line["tEmit"]
        add_parts(served.parts_ms, line)


def add_parts(parts_ms: dict[str, list[float]], line: dict[str, Any]) -> None:
    """The parts between those stamps that the line has."""
    if not line.get("tB0"):  # one rank: what it sends itself
        line = line | {"tB0": line["tSend"], "tB1": line["tRecv"]}
    for part, (begin, end) in PARTS.items():
        if line.get(begin) and line.get(end):
            parts_ms.setdefault(part, []).append((line[end] - line[begin]) * S * 1e3)


def settings(folder: Path, server: str, work: str, gpus: int) -> list[str]:
    """Of the ranks, for the most clients."""
    found = rank_settings(f"unix://{folder}/robots", "serial", MOST_HZ, RUN_S)
    at_most = f"max_request_hz={MOST_HZ}"
    side = SIDES.get(work, SIDE)
    more = ', dtype="float32"' if work == "tiny" else f", mean={list(MEAN)}, std={list(STD)}"
    image = f"image={{height={side}, width={side}{more if work != 'frames' else ''}}}"
    streams = [f'{{name="state", dim=14, {at_most}, reference=true}}']
    streams += [f'{{name="{camera}", {at_most}, {image}}}' for camera in CAMERAS_OF.get(work, ())]
    keys = [f'{name}={{key="{name}", layout="hwc"}}' for name in CAMERAS_OF.get(work, ())]
    keys = ", ".join(['state="state"', *keys])
    gateway = f'{{wire="openpi", listen="127.0.0.1:0", timeout_ms=5000, map={{{keys}}}}}'
    rows = 1 if server in LONE else BATCH[work]
    found += [f"streams=[{', '.join(streams)}]", f"gateway=[{gateway}]", f"batch.rows={rows}"]
    found += ["window.steps=1", f"actions.lease_ms={LEASE_MS}", ACCEPT]
    if work in PAUSES_MS:
        found += ["policy.target=bench.policies:build_pausing", "policy.options.steps=1"]
        found += [f'policy.options.work="{work}"', f"actions.dt_ms={LEASE_MS / 2}"]  # of one step
    else:
        horizon = 16 if work == "tiny" else HORIZON
        cut = ", cut=true" if gpus > 1 else ""
        found += ["policy.target=bench.policies:build_on_gpu"]
        found += [f'policy.options={{work="{work}"{cut}}}', *placement(work, gpus)]
        found += [f"actions.horizon={horizon}", f"actions.dt_ms={LEASE_MS / horizon}"]
    paced = PACED[server]
    gathering = [f"pipeline.gather_ms={GATHER_MS[work]}"] if "pipeline.pacing=rows" in paced else []
    return [*found, *paced, *gathering]


def placement(work: str, gpus: int) -> list[str]:
    """Of a policy with torch: as ``vla_tiny`` has it, on one GPU, or cut over several."""
    if work == "tiny":
        return ['placement.policy=["cpu", "cpu"]', "placement.parts=[1, 1, 1, 2, 2]"]
    if gpus == 1:
        return ["placement.rank0=cuda:0", "placement.policy=cuda:0"]
    policy = ", ".join(f'"cuda:{gpu}"' for gpu in range(1, gpus))
    return ["placement.rank0=cuda:0", f"placement.policy=[{policy}]", "placement.parts=auto"]


def policy_alone_ms(work: str) -> float | None:
    """p50 of a policy on a GPU with nothing around it, in a process that ends; None: on a CPU."""
    if work not in ON_GPU:
        return None
    code = f"from bench.policies import Unserved; print(Unserved('{work}').alone_ms())"
    command, environment = [sys.executable, "-c", code], environment_with_sources()
    said = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
    found_ms = float(said.stdout.split()[-1])
    print(f"the policy alone: {found_ms:.3f} ms")
    return found_ms


# ---- what was found -----------------------------------------------------------------------------


def judged(found: Sequence[ClientsCell], server: str = ROWS) -> tuple[list[Target], list[Claim]]:
    """The most clients against one, at a server with rows, by the median of the rounds' ratios.

    Requests are judged upside down, since a target is a most: those of one client over a share.
    """
    cells = {(cell.round, cell.clients): cell for cell in found if cell.server == server}
    most = max(COUNTS)
    pairs = [(cell, cells.get((number, most))) for (number, n), cell in cells.items() if n == 1]
    both = [(one, many) for one, many in pairs if many is not None]
    if not both:
        return [], []
    rates = [(many.per_s, one.per_s) for one, many in both]
    p50s = [(many.p50_ms, one.p50_ms) for one, many in both]
    targets, claims = [], []
    for what, found_pairs, limit in (
        (f"{server}: requests/s, 1 / {most} clients", [(b, a) for a, b in rates], 1 / RATE_MIN),
        (f"{server}: p50, {most} clients / 1", p50s, P50_MAX),
    ):
        reached = median_low([of / over for of, over in found_pairs])
        targets.append(Target(what, limit, reached))
        pair = median_round(found_pairs, lambda pair: pair[0] / pair[1])
        claims.append(ratio(what, *pair, reached))
    return targets, claims


def over_the_policy(found: Sequence[ClientsCell]) -> list[Target]:
    """One client's p50 over the policy's own time, the median of the rounds."""
    ones = [cell for cell in found if cell.clients == 1 and cell.over_ms is not None]
    return [
        Target(f"{server}: p50 of 1 client over the policy, ms", limit_ms, median_low(over))
        for server, limit_ms in OVER_MAX_MS.items()
        if (over := [cell.over_ms or 0.0 for cell in ones if cell.server == server])
    ]


def print_cells(found: Sequence[ClientsCell]) -> None:
    """Medians over the rounds with their range."""
    heads = ("clients", "requests/s", "x of 1", "p50 ms", "p99 ms", "over the policy", "foreign")
    print("\n" + f"{'server':22}" + "".join(f"{head:>22}" for head in (*heads, "faults")))
    for server in dict.fromkeys(cell.server for cell in found):
        rows = [cell for cell in found if cell.server == server]
        ones = {cell.round: cell.per_s for cell in rows if cell.clients == 1}
        for clients in sorted({cell.clients for cell in rows}):
            here = [cell for cell in rows if cell.clients == clients]
            over = [cell.over_ms for cell in here if cell.over_ms is not None]
            times = [cell.per_s / ones[cell.round] for cell in here if cell.round in ones]
            columns = (
                str(clients),
                range_text([cell.per_s for cell in here], 1),
                range_text(times, 2),
                range_text([cell.p50_ms for cell in here], 1),
                range_text([cell.p99_ms for cell in here], 1),
                range_text(over, 2) if over else "",
                range_text([cell.foreign for cell in here], 2),
                range_text([cell.faults for cell in here], 1),
            )
            print(f"{server:22}" + "".join(f"{column:>22}" for column in columns))


def print_logs(logs: dict[str, list[ServerLog]]) -> None:
    """Of all rounds: medians of the parts of a lone client's way, and shares of batch sizes."""
    for server, rounds in logs.items():
        rows = sum((served.rows for served in rounds), Counter[int]())
        if rows:
            shares = ", ".join(f"{n} rows {rows[n] / rows.total():.0%}" for n in sorted(rows))
            print(f"\n{server}: the policy was called with {shares}")
        for clients in sorted({n for served in rounds for n in served.ages_ms}):
            if values := [ms for served in rounds for ms in served.ages_ms.get(clients, ())]:
                found = spread(values)
                head = f"  age, {clients} clients"
                print(f"{head:20} p50 {found.p50:8.3f} ms   p99 {found.p99:8.3f}")
        print_parts("a lone client", PARTS, [served.parts_ms for served in rounds])
        for clients in sorted({n for served in rounds for n in served.cells_of()}):
            told = [served.told_ms.get(clients, {}) for served in rounds]
            print_parts(f"{clients} clients, requests", TOLD, told)
            envelopes = [served.envelopes_ms.get(clients, {}) for served in rounds]
            print_parts(f"{clients} clients, envelopes", PARTS, envelopes)


def print_parts(head: str, names: Iterable[str], rounds: Sequence[dict[str, list[float]]]) -> None:
    """Medians and p99 of durations in ms, on one line."""
    parts = []
    for name in names:
        if values := [ms for found in rounds for ms in found.get(name, ())]:
            found = spread(values)
            parts.append(f"{name} {found.p50:.3f} ({found.p99:.2f})")
    if parts:
        print(f"  {head}, p50 (p99) ms: {', '.join(parts)}")


if __name__ == "__main__":
    sys.exit(main())
