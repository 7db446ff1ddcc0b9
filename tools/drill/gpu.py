"""Faults between two GPUs: what one does to the streams, copies and memory of the other's rank.

Stage B never rests here: at any moment rank 0 has copies and receipts queued that wait for it, and
the policy rank the receipts of envelopes that are still to come. Faults that the policy commits
itself run it without graphs, because a replayed graph takes no orders.
"""

from __future__ import annotations

import signal
import time
from typing import Final

from drill.ending import three_endings
from drill.faults import Ending, Recovering, event, held, moved, order
from drill.scene import Scene

GPUS: Final = 2
IDLE_S: Final = 60.0
MOVED_TICKS: Final = 50  # of the robot's, while the policy behaves so
STUCK_S: Final = 0.5  # stage B does not end for so long before its process is killed
KILLED_S: Final = 3.0  # with the teardown of a GPU's context
FROZEN_S: Final = 5.0
LINKS: Final = ("peer", "pinned", "nccl")
WITHOUT_GRAPHS: Final = ("policy.graph=false",)
#: Three ranks, a part and a GPU each.
GPU_CHAIN: Final = range(3)
GPU_CHAIN_SETTINGS: Final = (
    "policy.target=drill.policy:build_chain",
    "policy.options.relays=2",
    'placement.policy=["cuda:1", "cuda:2"]',
    "placement.parts=[0, 1, 2]",
    "simulate.a_ms=0",
    "bringup.accept=['NOTHING_TO_HIDE', 'LOW_OVERLAP', 'CONTENDED']",
    *WITHOUT_GRAPHS,
)

#: CUDA_DEVICE_MAX_CONNECTIONS=32 is not among them: the ranks ask for it themselves.
GPU_SETTINGS: Final = (
    "placement.rank0=cuda:0",
    "placement.policy=cuda:1",
    "pipeline.pacing=saturated",
    "policy.options.b_ms=10",
    "simulate.kind=gpu",
)


def missing() -> str:
    """Returns the reason why this tier cannot run here; empty: it can."""
    return "" if _gpus() >= GPUS else "needs two GPUs"


def beyond_these_gpus() -> tuple[str, ...]:
    """Returns the names of the faults that need more GPUs than there are."""
    is_here = _gpus() >= len(GPU_CHAIN)
    return () if is_here else tuple(ending.name for ending in GPU_CHAIN_ENDINGS)


def _gpus() -> int:
    import torch  # for this alone: what prints the names of faults needs none

    return torch.cuda.device_count()


def silence_robot(scene: Scene) -> None:
    for stream in ("joints", "imu"):
        scene.order_robot(f"silent_{stream}", 1)


def wake_robot(scene: Scene) -> None:
    for stream in ("joints", "imu"):
        scene.order_robot(f"silent_{stream}", 0)


def kill_while_stuck(scene: Scene) -> None:
    """Rank 0's streams wait for a stage B that does not end, and then for nobody."""
    scene.order_policy("spin", 1)
    time.sleep(STUCK_S)
    scene.signal(1, signal.SIGKILL)


def _deaths(link: str) -> tuple[Ending, ...]:
    """Either rank killed or frozen, with graphs, everything queued, over this link."""
    ranks = ("rank 0", "the policy rank")
    endings = []
    for word, number, gone_s in (
        ("kill", signal.SIGKILL, KILLED_S),
        ("freeze", signal.SIGSTOP, FROZEN_S),
    ):
        for rank, who in enumerate(ranks):
            says = f"first to fail: rank {rank}: it left no exit code"
            endings.append(
                Ending(
                    f"{word}-{who.replace('the ', '').replace(' ', '-')}-{link}",
                    "F19 F20" if word == "kill" else "F21",
                    f"{number.name} to {who}, waits, receipts and copies pending, link {link}",
                    lambda scene, rank=rank, number=number: scene.signal(rank, number),  # type: ignore[misc]
                    (-9, 20) if rank == 0 else (20, -9),
                    gone_s,
                    says if word == "kill" else "(state T) was ended",
                    settings=(f"link.kind={link}",),
                )
            )
    return tuple(endings)


GPU_RECOVERING: Final = (
    Recovering(
        "robot-silent-for-a-minute",
        "F43 BT31",
        "the robot says nothing for 60 s, connected; then it does again",
        silence_robot,
        held(IDLE_S),
        IDLE_S + 10.0,
        undo=wake_robot,
        moves_s=5.0,
        holds=True,
        settings=("pipeline.pacing=sample",),
    ),
    Recovering(
        "cut-on-gpus",
        "F10 BT10 BT11",
        "SIGUSR1 to rank 0: a new epoch, envelopes queued on both GPUs",
        lambda scene: scene.signal(0, signal.SIGUSR1),
        event("first_action"),
        1.0,
    ),
    Recovering(
        "policy-raises-once-on-gpu",
        "F18 BT19",
        "one exception while stage B is queued",
        order("raise", 1),
        event("fault"),
        1.0,
        settings=WITHOUT_GRAPHS,
    ),
    Recovering(
        "policy-rebinds-once-on-gpu",
        "F31",
        "out['actions'] = x, once, while stage B is queued",
        order("rebind", 1),
        event("fault", fault="unwritten"),
        1.0,
        settings=WITHOUT_GRAPHS,
    ),
    Recovering(
        "policy-waits-for-its-gpu",
        "F21",
        "each call waits for all streams of its GPU: none of them waits for rank 0",
        order("synchronize", 1000),
        moved(MOVED_TICKS),
        5.0,
        settings=WITHOUT_GRAPHS,
    ),
    Recovering(
        "policy-writes-nothing-once-on-gpu",
        "F31",
        "nothing is queued that writes: rank 0 sees it in its copy of the result",
        order("nothing", 1),
        event("fault", fault="unwritten"),
        1.0,
        settings=WITHOUT_GRAPHS,
    ),
)

GPU_ENDINGS: Final = (
    *(ending for link in LINKS for ending in _deaths(link)),
    Ending(
        "policy-keeps-raising-on-gpu",
        "F18",
        "the policy raises on every envelope",
        order("raise", 1000),
        (26, 20),
        3.0,
        "results in a row could not be used",
        settings=WITHOUT_GRAPHS,
    ),
    Ending(
        "policy-crashes-on-gpu",
        "F20",
        "the policy calls abort()",
        order("crash", 1),
        (20, -6),
        KILLED_S,
        "first to fail: rank 1: it left no exit code",
        settings=WITHOUT_GRAPHS,
    ),
    Ending(
        "policy-out-of-gpu-memory",
        "F32 BT36",
        "more than the GPU has: torch first frees what it kept, and that waits for all streams",
        order("memory", 1000),
        (25, 20),
        3.0,
        "exit 25 OUT_OF_MEMORY 5 results in a row could not be used",
        settings=WITHOUT_GRAPHS,
    ),
    Ending(
        "policy-reads-beyond-memory",
        "F45",
        "a kernel of the policy has a bad address: its GPU refuses all further work",
        order("beyond", 1),
        (20, 22),
        4.0,
        "first to fail: rank 1: exit 22 POISONED",
        settings=WITHOUT_GRAPHS,
    ),
    Ending(
        "stage-b-never-ends-on-gpu",
        "F21",
        "a kernel of the policy runs for ever; its rank's heart beats",
        order("spin", 1),
        (21, 20),
        12.0,
        "a device or the link is stuck",
        settings=WITHOUT_GRAPHS,
    ),
    Ending(
        "stage-b-never-ends-nccl",
        "F21",
        "the same over NCCL, whose flight recorder is kept",
        order("spin", 1),
        (21, 20),
        16.0,
        "a device or the link is stuck",
        ("rank0.gen0.nccl.json", '"entries"'),
        settings=("link.kind=nccl", *WITHOUT_GRAPHS),
    ),
    Ending(
        "killed-while-streams-wait",
        "F20 F42",
        "such a kernel, then SIGKILL to its rank: rank 0's streams wait for a dead one",
        kill_while_stuck,
        (20, -9),
        STUCK_S + FROZEN_S,
        "first to fail: rank 1: it left no exit code",
        settings=WITHOUT_GRAPHS,
    ),
)


def _chain_endings(rank: int) -> tuple[Ending, ...]:
    """``rank`` of the chain ends in each of three ways, and all others because of it."""
    own = f".relay_{rank}" if rank < GPU_CHAIN[-1] else ""
    who = f"rank {rank} of a chain of three GPUs"
    more_s = KILLED_S - 2.5
    return three_endings("gpus", rank, GPU_CHAIN, own, who, GPU_CHAIN_SETTINGS, more_s)


GPU_CHAIN_ENDINGS: Final = tuple(end for rank in GPU_CHAIN for end in _chain_endings(rank))
