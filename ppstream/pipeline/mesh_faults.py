"""Faults of a policy that several ranks compute together: all of them raise, or the run ends.

A rank that raises alone has left a collective that the others are in, or will pair the next one
with the wrong call. So rank 0 counts who raised on an envelope: all of them is a fault of that
envelope, as with one rank; some of them for ``AGREE_NS`` is the end.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import MeshSplitError
from ppstream.cuda import startup

if TYPE_CHECKING:
    from collections.abc import Sequence

AGREE_NS: Final = NS_PER_S
#: Words of gloo and NCCL for a connection that broke; torch has no type for it.
LOST: Final = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
FRAMES: Final = 3  # innermost ones that are looked at
COLLECTIVES: Final = ("torch/distributed/", "torchinductor")  # parts of the paths of their code

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


def is_lost_connection(error: BaseException) -> bool:
    """True for what a collective raises when another rank of its group is gone."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)


def waits_for_collective(thread_id: int) -> bool:
    """True where the thread's innermost frames are a collective's, or of a compiled graph."""
    files: list[str] = []
    frame = sys._current_frames().get(thread_id)
    while frame is not None and len(files) < FRAMES:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return any(at in file for file in files for at in COLLECTIVES)


def waits_for_gpu() -> bool:
    """True while what a loop of host slots has queued on its GPU is not over; False on CPUs.

    There a collective holds up the stream, and the thread wherever that waits for the stream.
    """
    if (device := startup.started()) is None:
        return False
    try:
        return not _cuda.default_stream(device).query()
    except RuntimeError:  # the device has failed: the thread itself will say so
        return False


class MeshFaults:
    """Account of the ranks that raised, by envelope; for the thread that takes their frames.

    Args:
        ranks: of the mesh.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self._raised: dict[int, dict[int, str]] = {}  # by envelope and rank: what
        self._since: dict[int, int] = {}

    def note(self, rank: int, index: int, what: str, now_ns: int) -> None:
        """``rank`` raised ``what`` on envelope ``index``."""
        raised = self._raised.setdefault(index, {})
        self._since.setdefault(index, now_ns)
        raised[rank] = what
        if raised.keys() == self._ranks:
            del self._raised[index], self._since[index]

    def check(self, now_ns: int) -> None:
        """Raise when some ranks alone raised on an envelope.

        Raises:
            MeshSplitError: names them, and what they raised.
        """
        for index, since_ns in self._since.items():
            if now_ns - since_ns > AGREE_NS:
                raised = self._raised[index]
                texts = [f"rank {rank} raised {what}" for rank, what in sorted(raised.items())]
                others = ", ".join(f"rank {rank}" for rank in sorted(self._ranks - raised.keys()))
                raise MeshSplitError(
                    f"{'; '.join(texts)} on envelope {index}, but {others} did not within "
                    f"{AGREE_NS / NS_PER_S:g} s: collectives of the mesh no longer match"
                )
