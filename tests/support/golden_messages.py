"""Every message of every minor version of the wire, with a value in every field that it had.

Rows are never changed once their version is released: a later minor adds rows of its own.
``python tests/support/golden_messages.py`` writes the bytes of the newest version's rows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppstream.wire import rank_messages
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import WIRE_MAJOR, WIRE_MINOR, encoder
from ppstream.wire.robot_messages import Provenance

GOLDEN: Final = Path(__file__).parents[1] / "golden"
NEWEST: Final = f"{WIRE_MAJOR}.{WIRE_MINOR}"
STAMPS: Final = memoryview(bytes(range(8)))
VALUES: Final = memoryview(bytes(range(12)))
JOINTS: Final = m.StreamDeclaration("joints", 7, "float32")
CAMERA: Final = m.StreamDeclaration("wrist", 150528, "uint8", "jpeg")
CAMERA_1_2: Final = m.StreamDeclaration("wrist", 150528, "uint8", "jpeg", (224, 224, 3))

FROM_ROBOT_1_0: Final[dict[str, Any]] = {
    "hello": m.Hello(1, 0, "arm", (JOINTS,), ("dx", "dy"), 11, False),
    "samples": m.Samples(281474976710655, 1, STAMPS, VALUES),
    "report": m.ChunkReport(7, 2, 300, 25_000_000, 4),
    "reset": m.ResetRequest(7),
    "bye": m.Bye(7),
    "ping": m.Ping(7),
}
TO_ROBOT_1_0: Final[dict[str, Any]] = {
    "welcome": m.Welcome(1, 0, 7, "ready", 5 * 10**9, 10**8, 16, 10**7, (-1.0, -2.5), (1.0, 2.5)),
    "refused": m.Refused("contract", ("expected 7", "got 6")),
    "phase": m.Phase("draining"),
    "action_chunk": m.ActionChunk(7, 1, 2, 300, -5, 10, 20, 10**18, 3, VALUES),
    "lost": m.Lost(7),
}
FROM_ROBOT_1_1: Final[dict[str, Any]] = FROM_ROBOT_1_0 | {
    "hello": m.Hello(1, 1, "arm", (JOINTS, CAMERA), ("dx", "dy"), 11, False, "pick up the cube", 3),
    "instruct": m.Instruct(7, 3, "pick up the cube"),
    "clock_reading": m.ClockReading(7, 10**12, -(10**15)),
    "report": m.ChunkReport(7, 2, 300, 25_000_000, 4, 60_000_000, 1_500_000),
    "prefix": m.Prefix(7, 1, -5, 10**7, 10**9, 25_000_000, VALUES),
}
TO_ROBOT_1_1: Final[dict[str, Any]] = TO_ROBOT_1_0 | {
    "welcome": m.Welcome(
        1, 1, 7, "ready", 5 * 10**9, 10**8, 16, 10**7, (-1.0, 0.0), (1.0, 1.0), (1,), 6 * 10**7, 8
    ),
    "action_chunk": m.ActionChunk(
        7,
        1,
        2,
        300,
        -5,
        10,
        20,
        10**18,
        3,
        VALUES,
        Provenance({"joints": 3}, 1, 2, 3, 4, 5, 6, 7),
    ),
    "clock_question": m.ClockQuestion(7, 10**12),
    "conditioned": m.Conditioned(7, 3, "too long"),
}
FROM_ROBOT_1_2: Final[dict[str, Any]] = FROM_ROBOT_1_1 | {
    "hello": m.Hello(
        1, 2, "arm", (JOINTS, CAMERA_1_2), ("dx", "dy"), 11, False, "pick up the cube", 3
    ),
    "robot_state": m.RobotState(7, 2, 310_000_000, 1, "stop: operator", 690_000_000),
    "describe": m.Describe(1, 2),
}
TO_ROBOT_1_2: Final[dict[str, Any]] = TO_ROBOT_1_1 | {
    "welcome": m.Welcome(
        1,
        2,
        7,
        "ready",
        5 * 10**9,
        10**8,
        16,
        10**7,
        (-1.0, 0.0),
        (1.0, 1.0),
        (1,),
        6 * 10**7,
        8,
        (502, 100),
    ),
    "phase": m.Phase("degraded", ("top: silent, no sample for 1.02 s",)),
    "described": m.Described(
        1,
        2,
        "bring-up",
        (
            m.StreamDescription("joints", (7,), "float32"),
            m.StreamDescription("wrist", (224, 224, 3), "uint8", ("raw", "jpeg")),
        ),
        "joints",
        ("dx", "dy"),
        16,
        10**7,
        10**8,
        6 * 10**7,
    ),
}
#: Between ranks of one run both ends are one version: only the newest counts.
CONTROL: Final[dict[str, Any]] = {
    "rank_hello": rank_messages.RankHello(
        1, "token", 0, 1, "host", "boot", 42, {"config": {"a.b": 1}}
    ),
    "rank_welcome": rank_messages.RankWelcome("run", "logs/run"),
    "rank_refused": rank_messages.RankRefused(("a.b: 1 here, 2 there",)),
    "rank_heart": rank_messages.RankHeart("token"),
    "ready": rank_messages.Ready({"link": "host"}),
    "heartbeat": rank_messages.Heartbeat(12),
    "bell": rank_messages.Bell(300),
    "policy_fault": rank_messages.PolicyFault(
        5, "exception", "text", "ValueError: no", "policy.py:7 in __call__"
    ),
    "measure": rank_messages.Measure(30),
    "measured": rank_messages.Measured((1, 2, 3), "No space left on device"),
    "drain": rank_messages.Drain("duration"),
    "goodbye": rank_messages.Goodbye(0, "drained"),
    "phase_change": rank_messages.PhaseChange("ready"),
    "instruction": rank_messages.Instruction(5, "pick up the cube"),
    "instructed": rank_messages.Instructed(5, "too long"),
    "ask_compiled": rank_messages.AskCompiled(),
    "compiler_counts": rank_messages.CompilerCounts({"policy": {"graphs": 1, "breaks": 0}}),
    "part_times": rank_messages.PartTimes({"vision": 3_200_000, "language": 6_200_000}),
}

#: Family, version, its decoder, its rows.
VERSIONS: Final = (
    ("from_robot", "1.0", m.from_robot, FROM_ROBOT_1_0),
    ("to_robot", "1.0", m.to_robot, TO_ROBOT_1_0),
    ("from_robot", "1.1", m.from_robot, FROM_ROBOT_1_1),
    ("to_robot", "1.1", m.to_robot, TO_ROBOT_1_1),
    ("from_robot", "1.2", m.from_robot, FROM_ROBOT_1_2),
    ("to_robot", "1.2", m.to_robot, TO_ROBOT_1_2),
    ("control", "1.2", rank_messages.control, CONTROL),
)


def path_of(family: str, version: str, name: str) -> Path:
    return GOLDEN / f"{family}-{version}-{name}.bin"


if __name__ == "__main__":
    for family, version, _, rows in VERSIONS:
        for name, message in rows.items() if version == NEWEST else ():
            path_of(family, version, name).write_bytes(encoder.encode(message))
