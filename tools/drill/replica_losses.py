"""Faults of replicas: one that is lost is missed by nobody, or ends the run in its bound."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Final

from drill.faults import Ending, Recovering, event
from drill.scene import Scene

SERVED: Final = (
    "policy.target=drill.policy:build_stateless",
    "bringup.accept=['NOTHING_TO_HIDE', 'LOW_OVERLAP', 'CONTENDED']",
    "liveness.handshake_s=60",
)
ALL_NEEDED: Final = (*SERVED, "placement.replicas=3")
#: Three are lost in each run, one after the other.
SPARE: Final = (*SERVED, "placement.replicas=4", "placement.replicas_min=1")
RANKS: Final = range(4)  # rank 0 and three replicas
LOST_S: Final = {signal.SIGKILL: 2.5, signal.SIGSTOP: 3.5}  # until a loss is told: frozen_ms is 1.5
HOW: Final = {signal.SIGKILL: "kill", signal.SIGSTOP: "freeze"}


def lose(replica: int, number: signal.Signals) -> Callable[[Scene], None]:
    """The process that runs the replica, not the guard that outlives it, gets the signal."""

    def inject(scene: Scene) -> None:
        told = json.loads((scene.ranks.directory / "run.json").read_text())
        os.kill(int(told["policy_ranks"][replica - 1]["pid"]), number)

    return inject


def _lost(replica: int, number: signal.Signals, settings: tuple[str, ...]) -> Recovering:
    threads = settings[-1].partition("=")[2]
    return Recovering(
        f"replica-{HOW[number]}-{replica}-{threads}",
        "F19 F20" if number == signal.SIGKILL else "F21",
        f"{number.name} to replica {replica} of four, one is enough, threads {threads}",
        lose(replica, number),
        event("replica_lost", rank=replica),
        LOST_S[number],
        moves_s=2.5,
        holds=number == signal.SIGSTOP,  # for longer than its lease
        settings=settings,
    )


def _order(first: signal.Signals, other: signal.Signals, threads: str) -> tuple[Recovering, ...]:
    settings = (*SPARE, f"pipeline.threads={threads}")
    return tuple(_lost(k, first if k % 2 else other, settings) for k in RANKS[1:])


#: Ranks 1 and 3 are a replica, and 2 and 4.
OF_TWO_RANKS: Final = (
    "policy.target=drill.policy:build_stateless_mesh",
    *SERVED[1:],
    "placement.mesh=2",
    "placement.replicas=2",
    "placement.replicas_min=1",
)
REPLICA_RECOVERING: Final = (
    *_order(signal.SIGKILL, signal.SIGSTOP, "serial"),
    *_order(signal.SIGSTOP, signal.SIGKILL, "split"),
    Recovering(
        "replica-kill-member",
        "F19 F20",
        "SIGKILL to rank 4, the member of replica 2 of two that are meshes, one is enough",
        lose(4, signal.SIGKILL),
        event("replica_lost", rank=2),
        LOST_S[signal.SIGKILL],
        moves_s=2.5,
        settings=OF_TWO_RANKS,
    ),
)


def _ending(replica: int, number: signal.Signals) -> Ending:
    is_kill = number == signal.SIGKILL
    return Ending(
        f"replica-{HOW[number]}-{replica}-needed",
        "F19 F20" if is_kill else "F21",
        f"{number.name} to replica {replica} of three, all of them needed",
        partial(Scene.signal, rank=replica, number=number),
        tuple(-9 if rank == replica else 20 for rank in RANKS),
        2.5 if is_kill else 4.0,
        "it left no exit code" if is_kill else "(state T) was ended",
        settings=ALL_NEEDED,
    )


REPLICA_ENDINGS: Final = tuple(
    _ending(replica, number) for replica in RANKS[1:] for number in LOST_S
)
