"""Faults that end a run: with which codes, within which bound, and what the ranks say."""

from __future__ import annotations

import signal
from functools import partial
from typing import Final

from drill.bad_scrapers import drip_on_both
from drill.faults import BACK_STACKS, FRONT_STACKS, Ending, order
from drill.scene import Scene


def stop_decoding(scene: Scene) -> None:
    (scene.folder.parent / "decode").touch()


def leave_decoding(scene: Scene) -> None:
    part = scene.folder.parent / "decode.part"
    part.write_text("exit")
    part.replace(scene.folder.parent / "decode")


def stop_both(scene: Scene) -> None:
    for rank in (0, 1):
        scene.signal(rank, signal.SIGTERM)


def stop_beside_scrapers(scene: Scene) -> None:
    drip_on_both(scene)
    stop_both(scene)


ENDINGS: Final = (
    Ending(
        "kill-policy-rank",
        "F20 BT16",
        "SIGKILL to the policy rank, envelopes in flight",
        lambda scene: scene.signal(1, signal.SIGKILL),
        (20, -9),
        2.0,
        "first to fail: rank 1: it left no exit code",
    ),
    Ending(
        "kill-rank-0",
        "F19 BT15",
        "SIGKILL to rank 0",
        lambda scene: scene.signal(0, signal.SIGKILL),
        (-9, 20),
        2.0,
        "first to fail: rank 0: it left no exit code",
    ),
    Ending(
        "freeze-policy-rank",
        "F21 BT18",
        "SIGSTOP to the policy rank, for good",
        lambda scene: scene.signal(1, signal.SIGSTOP),
        (20, -9),
        3.5,
        "(state T) was ended",
    ),
    Ending(
        "freeze-rank-0",
        "F21",
        "SIGSTOP to rank 0, for good",
        lambda scene: scene.signal(0, signal.SIGSTOP),
        (-9, 20),
        3.5,
        "(state T) was ended",
    ),
    Ending(
        "kill-policy-rank-that-forked",
        "F20",
        "SIGKILL to a policy rank whose child holds all its descriptors, as a data loader's does",
        lambda scene: scene.signal(1, signal.SIGKILL),
        (20, -9),
        1.5,
        "ended what it had started",
        settings=(
            "policy.target=drill.standing_policy:build",
            "policy.options.inner=drill.policy:build",
            "policy.options.forks=true",
        ),
    ),
    Ending(
        "policy-crashes",
        "F20",
        "the policy calls abort()",
        order("crash", 1),
        (20, -6),
        2.0,
        "first to fail: rank 1: it left no exit code",
    ),
    Ending(
        "policy-calls-exit",
        "F18",
        "the policy calls sys.exit(3)",
        order("exit", 1),
        (20, 26),
        2.0,
        "exit 26 POLICY_OUTPUT the policy called sys.exit(3) at ",
    ),
    Ending(
        "decoder-calls-exit",
        "F18",
        "the decoder on rank 0 calls sys.exit(3)",
        leave_decoding,
        (26, 20),
        2.0,
        "exit 26 POLICY_OUTPUT the decoder called sys.exit(3) at ",
        settings=(
            "decode.target=drill.policy:build_decoder",
            "decode.options.orders={folder}/decode",
        ),
    ),
    Ending(
        "link-refuses",
        "F45",
        "the policy rank's link cannot send a result, though both ranks live",
        order("refuse", 1),
        (20, 22),
        3.0,
        "first to fail: rank 1: exit 22 POISONED",
    ),
    Ending(
        "policy-keeps-raising",
        "F18",
        "the policy raises on every envelope",
        order("raise", 1000),
        (26, 20),
        3.0,
        "results in a row could not be used",
    ),
    Ending(
        "policy-keeps-giving-nan",
        "F37 BT39",
        "the policy writes NaN on every envelope",
        order("nan", 1000),
        (26, 20),
        3.0,
        "results in a row could not be used",
    ),
    Ending(
        "policy-keeps-rebinding",
        "F31",
        "out['actions'] = x on every envelope",
        order("rebind", 1000),
        (26, 20),
        3.0,
        "write out['actions'].copy_(x)",
    ),
    Ending(
        "policy-keeps-writing-nothing",
        "F31",
        "an early return on every envelope",
        order("nothing", 1000),
        (26, 20),
        3.0,
        "write out['actions'].copy_(x)",
    ),
    Ending(
        "policy-keeps-writing-later",
        "F31",
        "a thread writes after the call has returned, on every envelope",
        order("later", 1000),
        (26, 20),
        3.0,
        "write out['actions'].copy_(x)",
    ),
    Ending(
        "policy-out-of-memory",
        "F32 BT36",
        "the policy runs out of memory on every envelope",
        order("memory", 1000),
        (25, 20),
        3.0,
        "OUT_OF_MEMORY",
    ),
    Ending(
        "policy-never-ends",
        "F21",
        "the policy loops for ever, in Python",
        order("endless", 1),
        (20, 21),
        6.0,
        "first to fail: rank 1: exit 21 WATCHDOG stage B made no progress",
        BACK_STACKS,
    ),
    Ending(
        "policy-holds-the-interpreter",
        "F21 F47",
        "the policy calls into C that lets no other Python thread run",
        order("hold", 1),
        (20, -9),
        3.5,
        "was ended",
        BACK_STACKS,
    ),
    Ending(
        "decoder-never-ends",
        "F22",
        "stage C on rank 0 loops for ever",
        stop_decoding,
        (21, 20),
        6.0,
        "exit 21 WATCHDOG rank 0's loop made no progress",
        FRONT_STACKS,
        (
            "decode.target=drill.policy:build_decoder",
            "decode.options.orders={folder}/decode",
        ),
    ),
    Ending(
        "decode-thread-never-ends",
        "F22",
        "the same, with a thread of its own for stage C",
        stop_decoding,
        (21, 20),
        6.0,
        "exit 21 WATCHDOG the decode thread made no progress",
        FRONT_STACKS,
        (
            "decode.target=drill.policy:build_decoder",
            "decode.options.orders={folder}/decode",
            "pipeline.threads=split",
        ),
    ),
    Ending(
        "stop-signal",
        "BT28",
        "SIGTERM to both ranks in the same moment, as a launcher sends it",
        stop_both,
        (0, 0),
        5.0,
        "exit 0 DRAINED",
    ),
    Ending(
        "stop-beside-scrapers",
        "F42 F44 BT28",
        "the same, while each rank serves a request for /metrics that never ends",
        stop_beside_scrapers,
        (0, 0),
        5.0,
        "exit 0 DRAINED",
    ),
)

#: Four ranks on CPUs: a part on rank 0, one on each policy rank.
CHAIN_SETTINGS: Final = (
    "policy.target=drill.policy:build_chain",
    "policy.options.relays=3",
    'placement.policy=["cpu", "cpu", "cpu"]',
    "placement.parts=[0, 1, 2, 3]",
    "bringup.accept=['NOTHING_TO_HIDE', 'LOW_OVERLAP', 'CONTENDED']",
)
CHAIN: Final = range(4)
#: Three ranks on CPUs: rank 1 leads a mesh, rank 2 is its other member.
MESH_SETTINGS: Final = (
    "policy.target=drill.policy:build_mesh",
    "placement.mesh=2",
    "bringup.accept=['NOTHING_TO_HIDE', 'LOW_OVERLAP', 'CONTENDED']",
)
MESH: Final = range(3)


def _chain_endings(rank: int) -> tuple[Ending, ...]:
    """``rank`` of the chain ends in each of three ways, and all others because of it."""
    own = f".relay_{rank}" if rank < CHAIN[-1] else ""
    who = f"rank {rank} of a chain of four"
    return three_endings("chain", rank, CHAIN, own, who, CHAIN_SETTINGS)


def _mesh_endings(rank: int) -> tuple[Ending, ...]:
    """The same of a rank of the mesh."""
    who = "the leader of a mesh of two" if rank == 1 else "the other member of a mesh of two"
    return three_endings("mesh", rank, MESH, f".rank_{rank}", who, MESH_SETTINGS)


def three_endings(
    form: str,
    rank: int,
    ranks: range,
    own: str,
    who: str,
    settings: tuple[str, ...],
    more_s: float = 0.0,
) -> tuple[Ending, ...]:
    """``rank`` of ``ranks`` is killed, frozen and starved, and all others end because of it.

    Args:
        form: begins the names.
        rank: whose end it is.
        ranks: of the run.
        own: ends the name of the file that its orders stand in.
        who: that rank, in words.
        settings: of the run.
        more_s: what it takes longer than on CPUs to be gone.
    """
    stopped = partial(Scene.signal, rank=rank, number=signal.SIGSTOP)
    killed = partial(Scene.signal, rank=rank, number=signal.SIGKILL)
    says = f"exit 21 WATCHDOG {'stage B' if rank else ''}"
    rows = (
        ("kill", "F19 F20", "SIGKILL to {}", killed, -9, 2.5, "it left no exit code"),
        ("freeze", "F21", "SIGSTOP to {}, for good", stopped, -9, 4.0, "(state T) was ended"),
        ("starve", "F21", "the part of {} loops for ever", order("endless", 1, own), 21, 6.5, says),
    )
    return tuple(
        Ending(
            f"{form}-{kind}-rank-{rank}",
            ids,
            does.format(who),
            inject,
            tuple(code if other == rank else 20 for other in ranks),
            gone_s + more_s,
            found,
            settings=settings,
        )
        for kind, ids, does, inject, code, gone_s, found in rows
    )


CHAIN_ENDINGS: Final = tuple(ending for rank in CHAIN for ending in _chain_endings(rank))
MESH_ENDINGS: Final = tuple(ending for rank in MESH[1:] for ending in _mesh_endings(rank))
