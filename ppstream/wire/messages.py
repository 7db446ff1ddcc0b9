"""What travels: the robot's wire and the control frames between ranks, as tagged structs.

Robot wire: one message per ZeroMQ frame. Control frames: length-prefixed on a socket of their own.
Every struct is array-like with an integer tag: new fields are appended with defaults, nothing is
renamed or removed, and the robot's wire skips fields that it does not know yet (ranks of one run
have one version: there an unknown field is an error). Robot clocks stamp samples; no instant of one
clock is compared with another's. Nothing here opens a socket.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ppstream.core.errors import MAX_TEXT
from ppstream.wire.fields import (
    MAX_DETAILS,
    MAX_DIM,
    MAX_FAULT,
    MAX_INSTRUCTION,
    MAX_NAME,
    WIRE_MAJOR,
    WIRE_MINOR,
    fault_text,
)
from ppstream.wire.rank_messages import (
    Bell,
    Control,
    Drain,
    Goodbye,
    Heartbeat,
    Instructed,
    Instruction,
    Measure,
    Measured,
    PhaseChange,
    PolicyFault,
    RankHeart,
    RankHello,
    RankRefused,
    RankWelcome,
    Ready,
)
from ppstream.wire.robot_messages import (
    ActionChunk,
    Bye,
    ClockQuestion,
    ClockReading,
    Conditioned,
    FromRobot,
    Hello,
    HelloVersion,
    Instruct,
    Lost,
    Phase,
    Ping,
    Prefix,
    Refused,
    Report,
    Reset,
    RobotState,
    Samples,
    StreamDeclaration,
    ToRobot,
    Welcome,
)

__all__ = [
    "DECODE_ERRORS",
    "MAX_DETAILS",
    "MAX_DIM",
    "MAX_FAULT",
    "MAX_INSTRUCTION",
    "MAX_NAME",
    "MAX_TEXT",
    "WIRE_MAJOR",
    "WIRE_MINOR",
    "ActionChunk",
    "Bell",
    "Bye",
    "ClockQuestion",
    "ClockReading",
    "Conditioned",
    "Control",
    "Drain",
    "FromRobot",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "HelloVersion",
    "Instruct",
    "Instructed",
    "Instruction",
    "Lost",
    "Measure",
    "Measured",
    "Phase",
    "PhaseChange",
    "Ping",
    "PolicyFault",
    "Prefix",
    "RankHeart",
    "RankHello",
    "RankRefused",
    "RankWelcome",
    "Ready",
    "Refused",
    "Report",
    "Reset",
    "RobotState",
    "Samples",
    "StreamDeclaration",
    "ToRobot",
    "Welcome",
    "control",
    "encoder",
    "fault_text",
    "from_robot",
    "hello_version",
    "to_robot",
]

encoder: Final = msgspec.msgpack.Encoder()
from_robot: Final[msgspec.msgpack.Decoder[FromRobot]] = msgspec.msgpack.Decoder(FromRobot)
to_robot: Final[msgspec.msgpack.Decoder[ToRobot]] = msgspec.msgpack.Decoder(ToRobot)
hello_version: Final = msgspec.msgpack.Decoder(HelloVersion)
control: Final[msgspec.msgpack.Decoder[Control]] = msgspec.msgpack.Decoder(Control)

#: Everything a hostile frame can make a decoder raise.
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
