"""Runs of replicas that serve a robot, and what is left of one that has lost a replica."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ranks import END_LIMIT_S, Ranks
from robot_rig import wait_until

from ppstream.core.clock import now_ns
from ppstream.launch import guard
from ppstream.robot.client import RobotClient

#: Ranks are told that they have guards, whose interpreters take seconds; what they tell theirs goes
#: to standard error.
UNGUARDED = {guard.LINKED_FD: "2"}
SERVES = ("liveness.handshake_s=60", "service.duration_s=none", "actions.lease_ms=2000")


@contextmanager
def robot(folder: Path) -> Iterator[list[int]]:
    """One that pushes samples all the time; gives the times at which chunks came."""
    came: list[int] = []
    streams, names = (("joints", 3), ("imu", 2)), ("a", "b")
    client = RobotClient(
        f"unix://{folder}/robots",
        robot="robot",
        streams=streams,
        actions=names,
        on_chunk=lambda _: came.append(now_ns()),
    )
    ended = threading.Event()

    def push() -> None:
        while not ended.wait(0.01):
            client.push("joints", now_ns(), [0.0] * 3)
            client.push("imu", now_ns(), [0.0] * 2)

    client.connect(60)
    thread = threading.Thread(target=push)
    thread.start()
    try:
        yield came
    finally:
        ended.set()
        thread.join()
        client.close()


@contextmanager
def serving(
    folder: Path,
    *settings: str,
    replicas: int,
    mesh: int = 1,
    limit_s: float = END_LIMIT_S,
    guarded: bool = False,
) -> Iterator[tuple[Ranks, list[int]]]:
    """A run that is ready within ``limit_s`` and serves a robot, and when its chunks come.

    ``guarded``: what was started of a replica that may be lost becomes the guard of its rank.
    """
    shape = f"placement.replicas={replicas}", f"service.endpoint=unix://{folder}/robots"
    ranks, env = replicas * mesh + 1, None if guarded else UNGUARDED
    with Ranks(folder, *SERVES, *shape, *settings, world_size=ranks, env=env) as run:
        run.wait_for_event("phase", limit_s, phase="ready")
        with robot(folder) as came:
            wait_until(lambda: len(came) > 20)
            yield run, came


def serves_degraded(run: Ranks, came: list[int], rank: int, left: int) -> None:
    """The robot is answered on, though a replica is lost."""
    assert run.wait_for_event("replica_lost", rank=rank)["left"] == left
    run.wait_for_event("phase", phase="degraded")
    before = len(came)
    wait_until(lambda: len(came) > before + 20)


def ends_balanced(run: Ranks, lost: int, most: int = 4) -> None:  # D_in
    """Every envelope is accounted for; of the lost replica's at most so many are dropped."""
    lines = [line for line in run.lines(0) if line["kind"] == "envelope"]
    drops = Counter(line.get("drop") for line in lines)
    assert drops["replica_lost"] <= most
    assert {line["replica"] for line in lines if line.get("drop") == "replica_lost"} <= {lost}
    assert lost not in {line["replica"] for line in run.envelopes("degraded")[most:]}
    books = [line["envelopes"] for line in run.lines(0) if line["kind"] == "ledger"]
    last = books[-1]
    assert last["received"] == last["used"] + last["in_flight"] + sum(last["dropped"].values())
    assert last["in_flight"] == 0
    assert last["dropped"].get("replica_lost", 0) == drops["replica_lost"]
