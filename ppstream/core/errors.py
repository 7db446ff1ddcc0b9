"""Errors by name, and the exit code that each end of a rank carries.

Expected trouble is a value (a drop with its reason); an error is a promise that cannot be kept.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    """End of a rank; torchrun itself returns 0 or 1, so ``exit.json`` carries this."""

    DRAINED = 0
    INTERNAL = 1  # an unexpected exception: a bug
    HANDSHAKE = 10  # ranks disagree on configuration or versions
    CONFIG = 11  # configuration or preflight: nothing was started
    PEER_LOST = 20  # the other rank is gone
    WATCHDOG = 21  # a rank or thread made no progress within its limit
    POISONED = 22  # communication can no longer be trusted
    PROTOCOL = 23  # a frame or header broke the contract
    OUT_OF_MEMORY = 25
    POLICY_OUTPUT = 26  # the policy kept failing or returned unusable actions
    GATE_FAIL = 30  # bring-up: overlap or safety failed
    GATE_INCONCLUSIVE = 31  # bring-up: overlap could not be proven


#: What each code means, and what to do; ``--help`` and runbooks/exit-codes.md show the same.
MEANINGS: Final = {
    ExitCode.DRAINED: "asked to stop, or its input has ended; nothing is owed",
    ExitCode.INTERNAL: "an unexpected exception: a bug; its traceback is printed above",
    ExitCode.HANDSHAKE: "ranks differ in configuration, versions or weights: the lines above",
    ExitCode.CONFIG: "configuration or installation; nothing was started: the lines above",
    ExitCode.PEER_LOST: "the other rank died, or was silent for liveness.frozen_ms: restart",
    ExitCode.WATCHDOG: "no progress for liveness.watchdog_s; names the thread: restart",
    ExitCode.POISONED: "the link can no longer be trusted: restart",
    ExitCode.PROTOCOL: "a frame or header broke the contract: two versions, or a bug",
    ExitCode.OUT_OF_MEMORY: "memory ran out: a smaller policy, batch or ring",
    ExitCode.POLICY_OUTPUT: "too many unusable results in a row, or user code called sys.exit()",
    ExitCode.GATE_FAIL: "bring-up: overlap or safety failed: read the report",
    ExitCode.GATE_INCONCLUSIVE: "bring-up: overlap could not be proven: read the report",
}

INTERRUPTED: Final = 130  # exit code of a command other than a run that Ctrl-C ends, as a shell's
MAX_TEXT: Final = 4096  # characters of what went wrong, wherever it is told
MAX_PLACE: Final = 256  # characters: a file, a line and a function
OTHER_LEFT: Final = "the other rank left with"  # how a reason begins that is the other rank's

#: Restarting does not improve these: a later generation ends at once with the same code.
FINAL_CODES = frozenset(
    {ExitCode.HANDSHAKE, ExitCode.CONFIG, ExitCode.GATE_FAIL, ExitCode.GATE_INCONCLUSIVE}
)


def printable(text: str, characters: int, instead: str = "?") -> str:
    """Returns the beginning of a text of others, with ``instead`` for what does not print."""
    return "".join(one if one.isprintable() else instead for one in text[:characters])


def counted(number: int, noun: str) -> str:
    """Words such as ``1 value`` and ``2 values``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class PpstreamError(Exception):
    """Base of all errors that ppstream raises; ``exit_code`` is how a rank ends because of it."""

    exit_code: ExitCode = ExitCode.CONFIG


class ConfigError(PpstreamError):
    """The configuration cannot be used. ``problems`` holds every one found, with its path."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class SpecError(PpstreamError):
    """A tensor, stream or sample does not have the declared name, shape or dtype."""


class LogError(PpstreamError):
    """A run log cannot be read: the file, the line, and what was expected."""


class ClaimError(PpstreamError):
    """A list of claims cannot be audited: the claim, and what it lacks."""


class CompareError(PpstreamError):
    """Two runs cannot be compared fairly; the message names every difference that matters."""


class HandshakeError(PpstreamError):
    """Ranks or robots disagree before anything moved; the message is the difference."""

    exit_code = ExitCode.HANDSHAKE


class PeerLostError(PpstreamError):
    """The other side's control socket reached its end."""

    exit_code = ExitCode.PEER_LOST


class PeerLeftError(PeerLostError):
    """The other rank said why it leaves; what restarting cannot improve is our end, too.

    Args:
        code: its exit code, as it said it.
        reason: as it said it.
    """

    def __init__(self, code: int, reason: str) -> None:
        theirs = ExitCode(code)
        is_ours = theirs is ExitCode.DRAINED or theirs in FINAL_CODES
        self.exit_code = theirs if is_ours else ExitCode.PEER_LOST
        self.reported = f"exit {code} {theirs.name} {reason}"
        is_passed_on = reason.startswith(OTHER_LEFT)
        super().__init__(reason if is_passed_on else f"{OTHER_LEFT} {code} {theirs.name}: {reason}")


class StoppedEarlyError(BaseException):
    """A signal came before anything was started: leave, there is nothing to drain.

    It is raised wherever the main thread happens to be, so it is no ``Exception``: neither a
    thread's start nor user code may take it for a failure of its own.

    Args:
        reason: which signal, or who is gone.
        exit_code: ``PEER_LOST`` where the launcher sent it because the other rank is gone.
    """

    def __init__(self, reason: str, exit_code: ExitCode = ExitCode.DRAINED) -> None:
        self.exit_code = exit_code
        super().__init__(reason)


class PeerFrozenError(PeerLostError):
    """The other side neither said nor did anything for too long, though its socket is open."""


class ReceiverEndedError(PpstreamError):
    """A robot client's receiving thread ended by an exception; the message ends with its traceback.

    No action chunk can come any more: close the client and make another.
    """

    exit_code = ExitCode.INTERNAL


class RateError(PpstreamError):
    """A robot asks more often than rank 0 takes its samples; the message has limit and remedy."""


class WatchdogError(PpstreamError):
    """Something made no progress within its limit; the message names it."""

    exit_code = ExitCode.WATCHDOG


class ProtocolError(PpstreamError):
    """A frame, header or order of calls broke the contract between two sides."""

    exit_code = ExitCode.PROTOCOL


class MeshSplitError(PpstreamError):
    """Some ranks of a mesh raised on an envelope and others did not: their collectives differ."""

    exit_code = ExitCode.POISONED


class PolicyError(PpstreamError):
    """The policy failed too often in a row, or its output cannot be used."""

    exit_code = ExitCode.POLICY_OUTPUT


class PolicyMemoryError(PolicyError):
    """The policy ran out of memory too often in a row."""

    exit_code = ExitCode.OUT_OF_MEMORY


class GateFailedError(PpstreamError):
    """Bring-up judged the run and said no."""

    exit_code = ExitCode.GATE_FAIL


class GateInconclusiveError(PpstreamError):
    """Bring-up could neither prove nor refute overlap."""

    exit_code = ExitCode.GATE_INCONCLUSIVE
