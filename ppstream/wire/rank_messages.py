"""Control frames between ranks: length-prefixed, on a socket of their own; see ``control/peer.py``.

Ranks of one run have one version, so an unknown field is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ppstream.wire.fields import ControlFrame, Id, InstructionText, Name, PlaceText, Text


class RankHello(ControlFrame, frozen=True, tag=1):
    """A policy rank introduces itself; rank 0 compares before any tensor moves."""

    major: int
    token: Name  # of this run, handed out by the launcher's store: strangers do not know it
    generation: int
    rank: int
    host: Name
    boot_id: Name
    pid: int
    facts: dict[str, dict[str, Any]]  # key class -> resolved key -> value


class RankWelcome(ControlFrame, frozen=True, tag=2):
    """Rank 0 accepts: where the run's logs go."""

    run_id: Name
    run_dir: Text


class RankRefused(ControlFrame, frozen=True, tag=3):
    """Rank 0 refuses: the difference, line by line."""

    difference: tuple[Text, ...]


class Ready(ControlFrame, frozen=True, tag=4):
    """The sender has built everything it needs and holds its end of the link open."""

    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class Heartbeat(ControlFrame, frozen=True, tag=5):
    """The sender's process is alive; ``progress`` counts what its loop has finished."""

    progress: int


class Bell(ControlFrame, frozen=True, tag=6):
    """Doorbell: slot data of this index is complete (an envelope or a result, by direction)."""

    index: int


class PolicyFault(ControlFrame, frozen=True, tag=7):
    """Reason why the result of ``index`` carries no actions; sent before its doorbell."""

    index: int
    kind: Name  # exception | memory | unwritten
    text: Text  # its traceback, of the first one of a kind; empty: what and place say enough
    what: Text = ""
    place: PlaceText = ""


class Measure(ControlFrame, frozen=True, tag=8):
    """Tell stage B's times on a device, of the newest ``repeats`` envelopes; write out the log."""

    repeats: int


class Measured(ControlFrame, frozen=True, tag=9):
    """Durations of stage B on its device; none where the results' headers have them."""

    durations_ns: tuple[int, ...]
    log_refused: Text = ""  # why the sender's log could not be written; empty: it could


class Drain(ControlFrame, frozen=True, tag=10):
    """No envelope will follow: finish, answer Goodbye, leave."""

    reason: Text


class Goodbye(ControlFrame, frozen=True, tag=11):
    """The sender leaves with this exit code."""

    code: int
    reason: Text


class PhaseChange(ControlFrame, frozen=True, tag=12):
    """Rank 0 entered a phase."""

    phase: Name


class Instruction(ControlFrame, frozen=True, tag=13):
    """A text that rows of envelopes will name by ``id``; answered by Instructed."""

    id: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    text: InstructionText


class Instructed(ControlFrame, frozen=True, tag=14):
    """The policy has taken the text in: envelopes may name it from now on; or why it has not."""

    id: Id
    fault: Text = ""


class PartTimes(ControlFrame, frozen=True, tag=16):
    """Mean duration of each part of the policy that runs on a rank; before ``Measured``."""

    times_ns: dict[str, int]


class AskCompiled(ControlFrame, frozen=True, tag=17):
    """Tell what the compiler did so far, on each rank of a mesh; answered by CompilerCounts."""


class CompilerCounts(ControlFrame, frozen=True, tag=18):
    """Counts of the compiler by part: graphs, breaks, recompiles, kernels."""

    parts: dict[str, dict[str, int]]


class RankHeart(ControlFrame, frozen=True, tag=15):
    """The first frame of a rank's second connection, which heartbeats and a goodbye go through."""

    token: Name  # as in RankHello


Control = (
    RankHello
    | RankWelcome
    | RankRefused
    | Ready
    | Heartbeat
    | Bell
    | PolicyFault
    | Measure
    | Measured
    | Drain
    | Goodbye
    | PhaseChange
    | Instruction
    | Instructed
    | RankHeart
    | PartTimes
    | AskCompiled
    | CompilerCounts
)


control: Final[msgspec.msgpack.Decoder[Control]] = msgspec.msgpack.Decoder(Control)
