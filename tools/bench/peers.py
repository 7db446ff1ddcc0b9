"""Compares ppstream with what else serves a policy, in one run: latency, throughput, pipelining.

Two ranks and one, ZeroMQ's REQ/REP, the client that openpi publishes with a websocket server as
small as its own or with ppstream's gateway, and a compiled graph of Ray. Each peer is started,
asked and stopped in turn, in as many rounds as told; its robot is a process of its own, on one CPU,
and the process that it asks on another. Ratios are taken within a round, then their median.
``foreign`` is how many cores were busy with anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import torch
from bench import bare_pipeline, peers_environments, peers_work
from bench.cores import Cores
from bench.latency import rank_settings
from bench.pipeline_cpu import CASES, run_case
from claimed_numbers import Claim, median_round, ratio
from real_runs import (
    SOURCES,
    RankPair,
    Target,
    ending_cleanly,
    print_environment,
    print_targets,
    spread,
    write_json,
)

TWO, ONE = "ppstream, two ranks", "ppstream, one rank"
SPINNING: Final = "ppstream, spinning"  # two ranks that never sleep
WIRED: Final = "ppstream, openpi's wire"  # its client, through the gateway to two ranks
REP, OPENPI, RAY = "ZeroMQ REQ/REP", "openpi", "Ray compiled graph"
SERIAL, SPLIT, BY_HAND = "ppstream, serial", "ppstream, split", "by hand"
OURS: Final = (TWO, ONE, SPINNING)
ASKED: Final = (*OURS, WIRED, REP, OPENPI, RAY)
#: Peers that need an environment of their own: the package that it has.
PACKAGES: Final = {OPENPI: "openpi-client", WIRED: "openpi-client", RAY: "ray"}
ROBOTS: Final = dict.fromkeys(OURS, "ppstream") | {
    **dict.fromkeys((OPENPI, WIRED), "openpi"),
    REP: "reply",
    RAY: "ray",
}
PARTS: Final = ("none", "mlp", "cameras", "stages")
AT_50_HZ, WITH_MLP, FRAMES = "50 Hz, no work", "50 Hz, MLP", "30 Hz, three cameras"
ONE_FLIES, FOUR_FLY = "no work, 1 in flight", "no work, 4 in flight"
SATURATED: Final = "no work, saturated"
STAGES: Final = tuple(f"two stages of {case.name}" for case in CASES[:3])
TIMED: Final = {"none": (AT_50_HZ, 50.0), "mlp": (WITH_MLP, 50.0), "cameras": (FRAMES, 30.0)}
WARM: Final = 50
REQUESTS: Final = 500
CLOSED_REQUESTS: Final = 3000
IN_FLIGHT: Final = {ONE_FLIES: 1, FOUR_FLY: 4}
PIPELINED: Final = 4  # requests under way through Ray's stages
#: Bring-up of a policy that hardly works proves nothing, least of all on a CPU that it shares.
ACCEPT: Final = 'bringup.accept=["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"]'
ATTEMPTS: Final = 3  # of a peer in a round: the gate may refuse what a busy machine disturbs
LEASE_MS: Final = 2000  # no other peer drops what comes late
RUN_S: Final = 300.0
READY_LIMIT_S: Final = 60.0
LISTENS: Final = re.compile(r"clients of openpi connect to ws://(\S+)")
#: Most ms of a p50 with three cameras: that policy takes no time, so all of it is overhead.
OVERHEAD_MS: Final = {WIRED: 1.0, TWO: 0.4}
SPIN_MS: Final = 50  # longer than any peer's robot waits between two requests
END_LIMIT_S: Final = 10.0
ORDER_LIMIT_S: Final = 600.0  # of a whole measurement; each request has a limit of its own


class Goal(NamedTuple):
    """A quantile of a row over one of another, at most ``limit``."""

    row: str
    peer: str
    quantile: str
    over_row: str
    over: str
    limit: float


GOALS: Final = (
    *(
        Goal(row, ours, quantile, row, REP, limit)
        for row in (AT_50_HZ, WITH_MLP)
        for ours in (TWO, SPINNING)
        for quantile, limit in (("p50", 1.2), ("p99", 1.3))
    ),
    *(
        Goal(row, ours, quantile, row, peer, 1.0)
        for row in (AT_50_HZ, WITH_MLP, FRAMES)
        for ours in (TWO, SPINNING)
        for peer in (OPENPI, RAY)
        for quantile in ("p50", "p99")
    ),
    Goal(SATURATED, SERIAL, "p50", AT_50_HZ, REP, 0.13),
    Goal(ONE_FLIES, TWO, "p50", ONE_FLIES, REP, 2.2),
    *(Goal(row, way, "p50", row, BY_HAND, 1.005) for row in STAGES for way in (SERIAL, SPLIT)),
)


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One measurement, in µs: of latencies both quantiles, of periods the mean as ``p50``.

    Stages without work are saturated by bring-up: ``p50`` is that of their periods.
    """

    round: int
    row: str
    peer: str
    p50: float
    p99: float | None
    foreign: float  # cores
    unanswered: int = 0  # requests that found no taker, or no answer within a second


class NotServed(Exception):
    """A peer did not come up, or ended; the message says how."""


class PeerBench:
    """Options, environments and CPUs of one invocation, and what it found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.found: list[PeerResult] = []
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.pythons = dict.fromkeys((*OURS, REP), sys.executable)
        self.environment: dict[str, str] = {}  # of peers and robots, besides the usual
        free = sorted(os.sched_getaffinity(0))
        #: Of the process that is asked, of the robot, and of the second process behind the first.
        self.cpus = [free[0], free[min(1, len(free) - 1)], free[min(2, len(free) - 1)]]
        for peer, package in PACKAGES.items():
            if peer in options.peers:
                self._find(peer, package)

    def _find(self, peer: str, package: str) -> None:
        try:
            self.pythons[peer] = str(peers_environments.python_with(package))
        except peers_environments.Unavailable as error:
            self.skipped[peer] = str(error)

    def add_period(self, number: int, row: str, peer: str, us: float, cores: Cores) -> None:
        self.add([PeerResult(number, row, peer, us, None, cores.foreign())])

    def add(self, found: Sequence[PeerResult]) -> None:
        """Keeps results and prints them at once: a time limit costs the summary alone."""
        self.found += found
        for each in found:
            p99 = "" if each.p99 is None else f", p99 {each.p99:.0f}"
            print(f"  {each.row}, {each.peer}: {each.p50:.0f}{p99} us", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    torch.set_num_threads(1)
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        session = PeerBench(options, Path(name))
        mode = (
            f"{options.rounds} interleaved rounds; CPU {session.cpus[0]}: rank 0 or the server, "
            f"CPU {session.cpus[1]}: the robot, CPU {session.cpus[2]}: the policy rank; "
            "unix://, serial; an MLP of " + "-".join(map(str, peers_work.LAYERS)) + " in numpy"
        )
        print_environment(mode)
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", flush=True)
            for part in options.only:
                measure_part(session, number, part)
    targets, claims = judged(session.found)
    print_rows(session.found)
    print(", ".join(f"{package} {version}" for package, version in session.versions.items()))
    for peer, why in session.skipped.items():
        print(f"{peer}: skipped: {why}")
    print_targets(targets)
    rows = [asdict(found) for found in session.found]
    given = {"versions": session.versions, "skipped": session.skipped}
    write_json(options.json, mode, targets, claims=claims, found=rows, **given)
    return 0


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Choices of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="rows to measure")
    parser.add_argument("--peers", nargs="+", choices=ASKED, default=ASKED)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the requests of each row")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


# ---- one round ----------------------------------------------------------------------------------


def measure_part(session: PeerBench, number: int, part: str) -> None:
    """All peers once, in an order that turns with the round."""
    if part == "stages":
        measure_stages(session, number)
        return
    peers = [peer for peer in session.options.peers if peer in session.pythons]
    turn = number % max(1, len(peers))
    for peer in peers[turn:] + peers[:turn]:
        for _ in range(ATTEMPTS):
            try:
                session.add(measure_peer(session, number, peer, part))
                break
            except NotServed as error:
                print(f"{peer}, {part}: {error}")
    if part == "none":
        saturate(session, number)


def measure_peer(session: PeerBench, number: int, peer: str, part: str) -> list[PeerResult]:
    """Latencies at a robot's rate; without work also as fast as answers come."""
    row, rate_hz = TIMED[part]
    times, closed = (max(1, round(n * session.options.scale)) for n in (REQUESTS, CLOSED_REQUESTS))
    with ExitStack() as stack:
        address = stack.enter_context(serving(session, peer, part))
        robot = stack.enter_context(AskingProcess(session, peer, address, part))
        cores = Cores()
        taken_us = robot.order(measure="latencies", times=times, warm=WARM, rate_hz=rate_hz)
        if not taken_us:
            raise NotServed("no request was answered")
        us, load = spread(taken_us), cores.foreign()
        found = [PeerResult(number, row, peer, us.p50, us.p99, load, times - us.n)]
        for row, in_flight in IN_FLIGHT.items() if part == "none" else ():
            if peer in (OPENPI, WIRED) and in_flight > 1:
                continue  # its protocol has one request under way
            order = {"measure": "period", "times": closed, "warm": WARM}
            cores = Cores()
            period_us = robot.order(**order, in_flight=in_flight)
            found.append(PeerResult(number, row, peer, period_us, None, cores.foreign()))
    return found


def saturate(session: PeerBench, number: int) -> None:
    """Period of stages without work, as fast as they go."""
    case = CASES[-1]
    cores = Cores()
    run = run_case(case, "serial", _envelopes(session, case.envelopes), ranks_cpus(session))
    session.add_period(number, SATURATED, SERIAL, spread(run.periods_ms).p50 * 1e3, cores)


def measure_stages(session: PeerBench, number: int) -> None:
    """Mean periods of two stages that sleep: ours, by hand, and Ray's."""
    for row, case in zip(STAGES, CASES, strict=False):
        envelopes, cpus = _envelopes(session, case.envelopes), ranks_cpus(session)
        for way, threads in ((SERIAL, "serial"), (SPLIT, "split")):
            cores = Cores()
            period_ms = run_case(case, threads, envelopes, cpus).period_ms
            session.add_period(number, row, way, period_ms * 1e3, cores)
        cores = Cores()
        sleeps_ms = (case.stage_ms / 2, case.stage_ms, case.stage_ms / 2)
        bare = bare_pipeline.measure(*sleeps_ms, 0, envelopes, cpus)
        session.add_period(number, row, BY_HAND, bare.period_ms * 1e3, cores)
        if RAY in session.pythons:
            try:
                measure_rays_stages(session, number, row, case.stage_ms, envelopes)
            except NotServed as error:
                print(f"{RAY}, {row}: {error}")


def measure_rays_stages(
    session: PeerBench, number: int, row: str, stage_ms: float, envelopes: int
) -> None:
    with AskingProcess(session, RAY, str(stage_ms), "none") as robot:
        cores = Cores()
        order = {"measure": "period", "times": envelopes, "warm": 30}
        session.add_period(number, row, RAY, robot.order(**order, in_flight=PIPELINED), cores)


def ranks_cpus(session: PeerBench) -> list[int]:
    """Rank 0's and the policy rank's."""
    return [session.cpus[0], session.cpus[2]]


def _envelopes(session: PeerBench, usual: int) -> int:
    return max(100, round(usual * session.options.scale))


# ---- a peer and its robot -----------------------------------------------------------------------


@contextmanager
def serving(session: PeerBench, peer: str, work: str) -> Iterator[str]:
    """The peer's server, while the block runs; its address."""
    with tempfile.TemporaryDirectory(dir=session.folder) as name:
        folder = Path(name)
        if peer in OURS or peer == WIRED:
            address = f"unix://{folder}/robots"
            more = gateway_settings(work) if peer == WIRED else ()
            more = [*more, f"pipeline.spin_ms={SPIN_MS}"] if peer == SPINNING else more
            asked = [*settings(address, work), *more]
            ranks = RankPair(folder, "bench", asked, world_size=1 + (peer != ONE))
            with ranks:
                ranks.pin(ranks_cpus(session))  # the gateway's, too: rank 0 starts it
                try:
                    yield listening(ranks) if peer == WIRED else address
                except NotServed as error:
                    raise NotServed(f"{error}\n{ranks.output()}") from None
        elif peer == RAY:
            yield ""
        else:
            given = f"ipc://{folder}/rep" if peer == REP else "127.0.0.1"
            module = ["-m", "bench.peers_servers", ROBOTS[peer], given, work]
            with program(session, peer, module, session.cpus[:1]) as server:
                yield read_line(server)


def settings(address: str, work: str) -> list[str]:
    """Of the ranks: those of ``latency.py``, with the work of the peers' policy."""
    found = rank_settings(address, "serial", TIMED[work][1], RUN_S)
    found += ["policy.target=bench.policies:build_peer", f"policy.options.work={work}"]
    found += [ACCEPT, "bringup.envelopes=200", f"actions.lease_ms={LEASE_MS}"]
    if work == "cameras":
        side = peers_work.SIDE
        cameras = ", ".join(
            f'{{name="{name}", rate_hz=30, image={{height={side}, width={side}}}}}'
            for name in peers_work.CAMERAS
        )
        state = f'{{name="state", dim={peers_work.STATE_DIM}, rate_hz=30, reference=true}}'
        found.append(f"streams=[{state}, {cameras}]")
    return found


def gateway_settings(work: str) -> list[str]:
    """A gateway to the same streams, whose windows are one observation each."""
    keys = [f'{name}={{key="{name}", layout="hwc"}}' for name in peers_work.CAMERAS]
    keys = [*(keys if work == "cameras" else ()), 'state="state"']
    gateway = f'wire="openpi", listen="127.0.0.1:0", timeout_ms=5000, map={{{", ".join(keys)}}}'
    lasting = f"actions.dt_ms={LEASE_MS / 2}"  # of one step: no peer's action is over before
    return [f"gateway=[{{{gateway}}}]", "window.steps=1", "policy.options.steps=1", lasting]


def listening(ranks: RankPair, limit_s: float = READY_LIMIT_S) -> str:
    """The gateway's address once the run serves; raises NotServed with the output when it ends."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and all(p.poll() is None for p in ranks.processes):
        log = ranks.directory / "rank0.gen0.jsonl"
        is_ready = log.is_file() and '"phase":"ready"' in log.read_text()
        if is_ready and (found := LISTENS.search(ranks.output())):
            return found[1]
        time.sleep(0.1)
    raise NotServed(f"the run did not become ready:\n{ranks.output()}")


class AskingProcess:
    """The process that asks one peer; a context manager."""

    def __init__(self, session: PeerBench, peer: str, address: str, work: str) -> None:
        cpus = ",".join(map(str, session.cpus))
        module = ["-m", "bench.peers_robot", ROBOTS[peer], address, work, cpus]
        self._program = program(session, peer, module, ())
        self._versions = session.versions

    def __enter__(self) -> AskingProcess:
        self._process = self._program.__enter__()
        self._versions |= json.loads(read_line(self._process))
        return self

    def __exit__(self, *error: Any) -> None:
        self._program.__exit__(*error)

    def page_faults(self) -> int:
        """Pages that the robot's process has faulted in so far."""
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[7])

    def order(self, **order: Any) -> Any:
        """Returns what the robot measured."""
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(read_line(self._process, ORDER_LIMIT_S))


@contextmanager
def program(
    session: PeerBench, peer: str, module: Sequence[str], cpus: Sequence[int]
) -> Iterator[subprocess.Popen[str]]:
    """A process in the peer's environment, on ``cpus`` if given; it ends with the block."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(SOURCES[-1:] if peer in PACKAGES else SOURCES),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **session.environment,
    }
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([session.pythons[peer], *module], env=environment, **pipes)
    try:
        if cpus:
            os.sched_setaffinity(process.pid, cpus)
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()  # a robot leaves by itself, and ends what it started
        try:
            process.wait(END_LIMIT_S if module[1] == "bench.peers_robot" else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_line(process: subprocess.Popen[str], limit_s: float = READY_LIMIT_S) -> str:
    """The next line of one that says one at a time; raises NotServed: it ended, or says nothing."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], limit_s)[0]:
        raise NotServed(f"{process.args}: said nothing for {limit_s:g} s")
    line = process.stdout.readline()
    if line:
        return line.strip()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
    raise NotServed(f"{process.args}: ended with {process.poll()}")


# ---- what was found -----------------------------------------------------------------------------


def judged(found: Sequence[PeerResult]) -> tuple[list[Target], list[Claim]]:
    """Targets of rows that were measured, each with the claim of the round that is its median."""
    by_place = {(each.row, each.peer, each.round): each for each in found}
    targets, claims = [], []
    for goal in GOALS:
        pairs = []
        for (row, peer, number), ours in by_place.items():
            theirs = by_place.get((goal.over_row, goal.over, number))
            if (row, peer) == (goal.row, goal.peer) and theirs is not None:
                pairs.append((getattr(ours, goal.quantile), getattr(theirs, goal.quantile)))
        if pairs:
            what = f"{goal.row}, {goal.peer}: {goal.quantile} / {goal.over}"
            what += "" if goal.over_row == goal.row else f" at {goal.over_row}"
            reached = median_low([ours / theirs for ours, theirs in pairs])
            targets.append(Target(what, goal.limit, reached))
            claims.append(
                ratio(what, *median_round(pairs, lambda pair: pair[0] / pair[1]), reached)
            )
    for peer, limit_ms in OVERHEAD_MS.items():
        p50s = [each.p50 / 1e3 for each in found if (each.row, each.peer) == (FRAMES, peer)]
        if p50s:
            targets.append(Target(f"{FRAMES}, {peer}: p50, ms", limit_ms, median_low(p50s)))
    return targets, claims


def print_rows(found: Sequence[PeerResult]) -> None:
    """By row and peer: medians over the rounds with their range, and ratios to the plain way."""
    for row in dict.fromkeys(each.row for each in found):
        plain = BY_HAND if row in STAGES else REP
        here = [each for each in found if each.row == row]
        heads = ("p50", "p99", f"p50 / {plain}", "foreign")
        print(f"\n{row + ', us':28}" + "".join(f"{head:>28}" for head in heads))
        base = {each.round: each for each in here if each.peer == plain}
        for peer in dict.fromkeys(each.peer for each in here):
            rounds = [each for each in here if each.peer == peer]
            ratios = [each.p50 / base[each.round].p50 for each in rounds if each.round in base]
            p99 = [each.p99 for each in rounds if each.p99 is not None]
            columns = (
                range_text([each.p50 for each in rounds], 0),
                range_text(p99, 0),
                range_text(ratios, 3),
                range_text([each.foreign for each in rounds], 2),
            )
            missing = sum(each.unanswered for each in rounds)
            note = f"  {missing} unanswered" if missing else ""
            print(f"{peer:28}" + "".join(f"{column:>28}" for column in columns) + note)


def range_text(values: Sequence[float], digits: int) -> str:
    """The median of rounds with their range."""
    if not values:
        return "-"
    shown = f"{median(values):.{digits}f}"
    return f"{shown} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
