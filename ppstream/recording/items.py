"""Items that the loops hand to the recorder: copies of what they took in, cut and emitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.analysis.records import EnvelopeLine
    from ppstream.config.schema import StreamConfig
    from ppstream.wire.robot_messages import ActionChunk

ITEM_BYTES: Final = 200  # of an item without its arrays


class SamplesItem(NamedTuple):
    """One message of samples, as it arrived; arrays as little-endian bytes."""

    robot: str
    stream: str
    first: int  # number of the first one in its stream,
    end: int  # and behind the last one
    stamps: bytes
    values: bytes
    received_ns: int

    @property
    def size(self) -> int:
        """Bytes it keeps while it waits."""
        return len(self.stamps) + len(self.values) + ITEM_BYTES


class RowWindow(NamedTuple):
    """One row's window."""

    robot: str
    at_ns: int
    epoch: int
    seq: int
    phase: str
    episode: tuple[int, int]
    window_end_ns: int
    expires_ns: int
    samples: dict[str, int]


class Cleared(NamedTuple):
    """One row's rings were emptied."""

    robot: str
    at_ns: int
    reason: str
    samples: dict[str, int]


class Emitted(NamedTuple):
    """A chunk, whose actions are a copy."""

    robot: str
    at_ns: int
    chunk: ActionChunk
    dropped: str


class LoggedLine(NamedTuple):
    """A line of the time-stamp log: an event or a robot's report."""

    at_ns: int
    fields: Mapping[str, Any]


class FrameItem(NamedTuple):
    """One frame of a camera, as it arrived."""

    robot: str
    stream: str
    number: int  # in its stream
    stamp_ns: int  # robot clock
    pixels: bytes  # [height * width * 3]
    received_ns: int

    @property
    def size(self) -> int:
        """Bytes it keeps while it waits."""
        return len(self.pixels) + ITEM_BYTES


class EnvelopeItem(NamedTuple):
    """Rank 0's line of an envelope, emitted or dropped."""

    at_ns: int
    line: EnvelopeLine


Item = SamplesItem | RowWindow | Cleared | Emitted | LoggedLine | FrameItem | EnvelopeItem


class Taker(Protocol):
    """Takes what a row's rings tell; must not block."""

    def samples(
        self, robot: str, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int
    ) -> None: ...

    def cleared(self, robot: str, reason: str) -> None: ...

    def frames(
        self, robot: str, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int
    ) -> None: ...


class RecordedRing(Protocol):
    """A stream's ring, as far as it is read and set."""

    stream: StreamConfig
    tap: RowTap | None


class RecordedRow(Protocol):
    """A row of rings, as far as it is read."""

    robot: str

    @property
    def reference(self) -> RecordedRing: ...

    @property
    def rings(self) -> Mapping[str, RecordedRing]: ...


class WindowOwner(Protocol):
    """Owner of a row's window, as far as it is read."""

    @property
    def present(self) -> bool: ...

    @property
    def episode(self) -> tuple[int, int]: ...

    @property
    def window_end_ns(self) -> int: ...

    @property
    def expires_ns(self) -> int: ...


class RowMark(NamedTuple):
    """Counts of what had come into a row's rings at some moment."""

    clears: int  # times they had been emptied
    samples: dict[str, int]  # by stream, of the robot


class RowTap:
    """Tap of a row's rings: calls the taker under the name of the robot that holds the row.

    Args:
        taker: is called.
        row: whose rings these are.
        place: of the row.
        has_name: tells which robots are known by their names, the others by their row.

    Attributes:
        clears: times the rings were emptied.
    """

    def __init__(
        self, taker: Taker, row: RecordedRow, place: int, has_name: Callable[[str], bool] = bool
    ) -> None:
        self._taker = taker
        self._row = row
        self._has_name = has_name
        self._place = f"row{place}"
        self.clears = 0

    @property
    def robot(self) -> str:
        """The name its session said; of a recording or made-up samples the row's."""
        robot = self._row.robot
        return robot if self._has_name(robot) else self._place

    def samples(self, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int) -> None:
        self._taker.samples(self.robot, stream, stamps, values, rx_ns)

    def cleared(self, stream: str, reason: str) -> None:
        """All rings of a row are emptied together: once is enough."""
        if stream == self._row.reference.stream.name:
            self.clears += 1
            self._taker.cleared(self.robot, reason)


class FrameTap(RowTap):
    """Tap of a camera's ring."""

    def samples(self, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int) -> None:
        self._taker.frames(self.robot, stream, stamps, values, rx_ns)
