"""Words of the wire: bounded numbers and texts, and the two kinds of struct that travel.

What is said with them stands in ``robot_messages.py`` (robots) and ``rank_messages.py`` (ranks).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ppstream.core.errors import MAX_PLACE, MAX_TEXT, printable

WIRE_MAJOR: Final = 1
WIRE_MINOR: Final = 2  # rank 0 serves robots of this minor version and of the one before

MAX_NAME = 64
MAX_DIM = 1 << 24  # values of one sample; a frame of a camera is the largest
MAX_AXES = 8  # of one sample
MAX_SAMPLE_BYTES = 3 << 20  # a camera's frame of 720 x 1280 has 2764800
MAX_PUSH_BYTES = 1 << 20  # samples and their stamps in one message, unless one sample has more
MAX_DETAILS = 256  # lines of a refusal
MAX_INSTRUCTION = 1024  # characters
MAX_FAULT = 256  # characters
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # fits the int64 of an envelope's rows
Ns = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Instant = Annotated[int, Meta(ge=-(2**62), le=2**62)]  # of a robot: differences fit int64
Count = Annotated[int, Meta(ge=0, le=2**53)]  # of a robot, or its duration: exact in any reader
Span = Annotated[int, Meta(gt=0, le=2**63 - 1)]  # a duration above zero
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
InstructionText = Annotated[str, Meta(max_length=MAX_INSTRUCTION)]
FaultText = Annotated[str, Meta(max_length=MAX_FAULT)]
PlaceText = Annotated[str, Meta(max_length=MAX_PLACE)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base: array-like on the wire, tracked by nobody's garbage collector."""


class ControlFrame(Message, frozen=True, forbid_unknown_fields=True):
    """Base of the frames between ranks."""


def fault_text(text: str) -> str:
    """The beginning of ``text`` as it may travel and be shown: characters that print, alone."""
    return printable(text, MAX_FAULT, " ")


encoder: Final = msgspec.msgpack.Encoder()

#: Everything a hostile frame can make a decoder raise.
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
