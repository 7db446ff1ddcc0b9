"""Recording: sensor streams read from a file, as they were recorded.

Nothing is repaired: gaps, repeats and disorder are what a replay is for. ``load.py`` chooses the
reader; ``sources.py`` (rank 0) and ``launch/replay.py`` (as a robot) play it. No torch here.
"""

from __future__ import annotations

import copy
import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import numpy as np

from ppstream.config.schema import CHANNELS
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.core.user_code import message_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig

DAMAGE_CHARS: Final = 300
CLOCK_JUMP: Final = "clock_jump"  # of a step: as the ledger of samples names it
AHEAD_NS: Final = NS_PER_S  # by more a clock jumped
UNTOLD: Final = -1  # count of a stream that a step does not name
NUMPY: Final = ".npz or .npy"
KINDS: Final = {
    ".mcap": "MCAP",
    ".bag": "a ROS bag",
    ".ulg": "ULog",
    ".npz": NUMPY,
    ".npy": NUMPY,
}
#: Types of messages that hold a frame, of ROS and of Foxglove.
IMAGES: Final = frozenset(
    {f"sensor_msgs/{kind}{name}" for kind in ("", "msg/") for name in ("Image", "CompressedImage")}
    | {f"foxglove.{name}" for name in ("RawImage", "CompressedImage", "CompressedVideo")}
    | {f"foxglove_msgs/msg/{name}" for name in ("RawImage", "CompressedImage", "CompressedVideo")}
)
#: For a file that is damaged, by its suffix.
REMEDIES: Final = {
    ".mcap": "`mcap recover FILE` keeps what is whole",
    ".bag": "`rosbag reindex FILE` may mend it, or copy it again",
}


class RecordedFrames:
    """Frames of a camera ``[n, height * width * 3]`` uint8 RGB, which stay in the file.

    ``frames[3:5]`` reads two of them, as an array of its own.

    Args:
        count: n.
        size: height and width.
        read: gives the pixels ``[height * width * 3]`` of a number.
        encoded: gives its JPEG or PNG as it was recorded, None where it is neither.
        topic: that the file has them in.
        is_readable: False where they are in a video, which nothing here decodes.
    """

    def __init__(
        self,
        count: int,
        size: tuple[int, int],
        read: Callable[[int], NDArray[np.uint8]],
        encoded: Callable[[int], bytes | None] | None = None,
        *,
        topic: str = "",
        is_readable: bool = True,
    ) -> None:
        self.size = size
        self.topic = topic
        self.is_readable = is_readable
        self._numbers = range(count)
        self._read = read
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, wanted: slice) -> NDArray[np.uint8]:
        """Raises ConfigError when the file cannot be read any more, or holds no such frame."""
        found = [self._read(number) for number in self._numbers[wanted]]
        return np.array(found, np.uint8).reshape(len(found), math.prod(self.size) * CHANNELS)

    def pixels(self, number: int) -> NDArray[np.uint8]:
        """One frame ``[height, width, 3]`` uint8 RGB, perhaps read-only. Raises ConfigError."""
        return self._read(self._numbers[number]).reshape(*self.size, CHANNELS)

    def encoded(self, number: int) -> bytes | None:
        """The frame's JPEG or PNG as recorded, None where it is neither. Raises ConfigError."""
        return None if self._encoded is None else self._encoded(self._numbers[number])

    def part(self, begin: int, end: int) -> RecordedFrames:
        """The frames from ``begin`` to before ``end``."""
        part = copy.copy(self)
        part._numbers = self._numbers[begin:end]
        return part


class Track(NamedTuple):
    """One stream of a recording, in the order it was recorded."""

    stamps_ns: NDArray[np.int64]  # [n], n >= 1, robot clock
    values: NDArray[Any] | RecordedFrames  # [n, dim] float32 or float64, of a camera uint8
    arrivals_ns: NDArray[np.int64] | None = None  # [n], when each came, in the robot's clock, too

    @property
    def due_ns(self) -> NDArray[np.int64]:
        """When each sample is played: as it came, else at its stamp; never before one ahead."""
        return np.maximum.accumulate(
            self.stamps_ns if self.arrivals_ns is None else self.arrivals_ns
        )

    def part(self, begin: int, end: int) -> Track:
        """The samples from ``begin`` to before ``end``."""
        arrivals = None if self.arrivals_ns is None else self.arrivals_ns[begin:end]
        found = self.values
        values = found.part(begin, end) if isinstance(found, RecordedFrames) else found[begin:end]
        return Track(self.stamps_ns[begin:end], values, arrivals)


def arrivals_on_stamps_clock(
    tracks: Mapping[str, Track], delay_max_ns: int = 0
) -> dict[str, Track]:
    """``tracks`` with arrivals, told on any clock, in that of the stamps.

    The quickest sample of all counts as not delayed: clocks are not compared any further. One that
    took up to ``delay_max_ns`` is taken for late, and both clocks for one.
    """
    delays_ns = [
        int((track.arrivals_ns - track.stamps_ns).min())
        for track in tracks.values()
        if track.arrivals_ns is not None and len(track.stamps_ns)
    ]
    offset_ns = min(delays_ns, default=0)
    if abs(offset_ns) <= delay_max_ns:
        return dict(tracks)
    return {
        name: track
        if track.arrivals_ns is None
        else track._replace(arrivals_ns=track.arrivals_ns - offset_ns)
        for name, track in tracks.items()
    }


def _before_jump(tracks: Mapping[str, Track]) -> dict[str, int]:
    """Samples by stream before the clock jumped ahead: rank 0 sees that some samples later.

    All of them where it jumped back: the quickest ones are the old clock's then.
    """
    came_ns = {
        name: track.arrivals_ns
        for name, track in tracks.items()
        if track.arrivals_ns is not None and len(track.stamps_ns)
    }
    counts = {name: len(track.stamps_ns) for name, track in tracks.items()}
    if not came_ns:
        return counts
    leads = {name: tracks[name].stamps_ns - came for name, came in came_ns.items()}
    bound_ns = max(int(lead.max()) for lead in leads.values()) - AHEAD_NS
    newest = max(came_ns, key=lambda name: int(came_ns[name][-1]))
    old = {name: np.flatnonzero(lead <= bound_ns) for name, lead in leads.items()}
    if leads[newest][-1] > bound_ns and any(map(len, old.values())):
        counts |= {name: int(found[-1]) + 1 if len(found) else 0 for name, found in old.items()}
    return counts


class RecordedStep(NamedTuple):
    """A moment of a recorded run: a window was cut, or the robot's history was emptied."""

    end_ns: int | None  # of the window, robot clock; None: emptied
    reason: str  # why it was emptied
    samples: Mapping[str, int]  # that had come before, by stream


class RecordedSteps(Sequence[RecordedStep]):
    """Steps in order, of which a day has millions: numbers in columns, no object for each."""

    def __init__(self, steps: Iterable[RecordedStep] = ()) -> None:
        self._ends_ns = array("q")
        self._reasons: dict[int, str] = {}  # by place, of those that emptied
        self._counts: dict[str, array[int]] = {}  # by stream
        for step in steps:
            self.append(step)

    def append(self, step: RecordedStep) -> None:
        place = len(self._ends_ns)
        if step.end_ns is None:
            self._reasons[place] = step.reason
        self._ends_ns.append(step.end_ns or 0)
        for name in step.samples.keys() - self._counts.keys():
            self._counts[name] = array("q", [UNTOLD]) * place
        for name, counts in self._counts.items():
            counts.append(step.samples.get(name, UNTOLD))

    def __len__(self) -> int:
        return len(self._ends_ns)

    @overload
    def __getitem__(self, place: int) -> RecordedStep: ...
    @overload
    def __getitem__(self, place: slice) -> list[RecordedStep]: ...
    def __getitem__(self, place: int | slice) -> RecordedStep | list[RecordedStep]:
        places = range(len(self._ends_ns))[place]
        return self._step(places) if isinstance(places, int) else [self._step(p) for p in places]

    def _step(self, place: int) -> RecordedStep:
        reason = self._reasons.get(place)
        end_ns = self._ends_ns[place] if reason is None else None
        found = {name: counts[place] for name, counts in self._counts.items()}
        told = {name: count for name, count in found.items() if count != UNTOLD}
        return RecordedStep(end_ns, reason or "", told)


class RecordedMessage(NamedTuple):
    """Consecutive samples of one stream, to be sent together."""

    due_ns: int  # of its last sample
    stream: str
    stamps_ns: NDArray[np.int64]
    values: NDArray[Any]


class Piece(NamedTuple):
    """A part of a recording, which keeps the robot's clock that it was recorded with."""

    recording: Recording
    begin_ns: int  # when its first sample is due in the whole recording
    reasons: frozenset[str]  # for which the history before it was emptied


class Unrepeatable(NamedTuple):
    """Words on windows of a run that cannot be cut again."""

    reason: str
    remedy: str


class Recording:
    """Tracks by stream name; of a run, the steps that can be repeated, and what was lost of it.

    ``images`` counts, by topic, the frames that the file holds, whether a track has them or not.
    ``part`` is the number of the part with which it begins.
    """

    def __init__(
        self,
        tracks: Mapping[str, Track],
        steps: Sequence[RecordedStep] = (),
        lost: Mapping[str, int] | None = None,
        robot: str = "",
        images: Mapping[str, int] | None = None,
        part: int = 1,
    ) -> None:
        self.tracks = dict(tracks)
        self.robot = robot  # its name, if that was recorded
        self.steps = steps
        self.lost = dict(lost or {})
        self.images = dict(images or {})
        self.part = part

    @property
    def lost_text(self) -> str:
        """Count of lost samples by stream, for people."""
        return ", ".join(f"{count} of {name!r}" for name, count in self.lost.items())

    @property
    def unrepeatable(self) -> Unrepeatable | None:
        """Says why the run's windows cannot be cut again; None: they can, if it had any."""
        if self.part > 1:
            reason = f"it begins with part {self.part} of a run, whose windows need those before"
            return Unrepeatable(reason, "the first part")
        if self.lost:
            reason = f"the recorder lost samples ({self.lost_text})"
            return Unrepeatable(reason, "a recording with a larger record.queue_mb")
        return None

    @property
    def first_ns(self) -> int:
        """The earliest time at which a sample is due."""
        return min(int(track.due_ns[0]) for track in self.tracks.values() if len(track.stamps_ns))

    @property
    def last_ns(self) -> int:
        """The time at which the last sample is due."""
        return max(int(track.due_ns[-1]) for track in self.tracks.values())

    def between_resets(self, same_clock_ns: int = 0) -> list[Piece]:
        """The recording in pieces: wherever a run's history was emptied, one ends.

        A robot's clock may have begun anew there, as a simulator's does with each episode. A piece
        whose clock differs by at most ``same_clock_ns`` goes on with the whole recording's.
        """
        begun, pieces, reasons = dict.fromkeys(self.tracks, 0), [], frozenset[str]()
        end = RecordedStep(None, "", {name: len(t.stamps_ns) for name, t in self.tracks.items()})
        for step in [*(step for step in self.steps if step.end_ns is None), end]:
            count = step.samples
            stop = {name: max(at, count.get(name, 0)) for name, at in begun.items()}
            if stop != begun:
                tracks = self._part(begun, stop)
                if step.reason == CLOCK_JUMP:
                    stop = {n: begun[n] + held for n, held in _before_jump(tracks).items()}
                    tracks = self._part(begun, stop)
                begin_ns = min(int(t.due_ns[0]) for t in tracks.values() if len(t.stamps_ns))
                on_clock = arrivals_on_stamps_clock(tracks, same_clock_ns)
                pieces.append(Piece(Recording(on_clock, robot=self.robot), begin_ns, reasons))
                reasons = frozenset()
            begun, reasons = stop, reasons | {step.reason}
        return pieces

    def _part(self, begin: Mapping[str, int], end: Mapping[str, int]) -> dict[str, Track]:
        return {name: track.part(begin[name], end[name]) for name, track in self.tracks.items()}

    def select(self, streams: Sequence[StreamConfig]) -> Recording:
        """The declared streams, in their order and dtype.

        Raises:
            ConfigError: a stream is not recorded, or has another width or size.
        """
        problems = []
        chosen = {}
        for stream in streams:
            track = self.tracks.get(stream.name)
            if track is None:
                recorded = ", ".join(self.tracks)
                problem = f"streams: {stream.name!r} is not recorded, want one of {recorded}"
                if stream.image is not None:
                    problem += '; record.frames = "jpeg" or "raw" keeps frames'
                problems.append(problem)
            elif (declared := _shape(stream)) != (recorded := _recorded_shape(track)):
                problems.append(
                    f"streams: {stream.name!r} has {declared}, recorded with {recorded}"
                )
            elif isinstance(track.values, RecordedFrames):
                chosen[stream.name] = track
            else:
                values = track.values.astype(stream.dtype, copy=False)
                chosen[stream.name] = track._replace(values=values)
        if problems:
            raise ConfigError(problems)
        return Recording(chosen, self.steps, self.lost, self.robot, self.images, self.part)

    def messages(self, batch_ns: int) -> Iterator[RecordedMessage]:
        """All samples in order of time; those of one stream within ``batch_ns`` go together.

        0 sends each alone, as frames always are. The arrays are views.
        """
        parts = [self._messages_of(name, batch_ns) for name in self.tracks]
        return heapq.merge(*parts, key=lambda message: message.due_ns)

    def _messages_of(self, stream: str, batch_ns: int) -> Iterator[RecordedMessage]:
        track = self.tracks[stream]
        due_ns = track.due_ns
        begin = 0
        while begin < len(due_ns):
            end = begin + 1
            if batch_ns > 0 and not isinstance(track.values, RecordedFrames):
                end = int(due_ns.searchsorted(due_ns[begin] + batch_ns, "left"))
            samples = slice(begin, end)
            last_ns = int(due_ns[end - 1])
            yield RecordedMessage(last_ns, stream, track.stamps_ns[samples], track.values[samples])
            begin = end


def _shape(stream: StreamConfig) -> str:
    image = stream.image
    return f"dim {stream.dim}" if image is None else _frames_of(image.height, image.width)


def _recorded_shape(track: Track) -> str:
    if isinstance(track.values, RecordedFrames):
        return _frames_of(*track.values.size)
    return f"dim {track.values.shape[1]}"


def _frames_of(height: int, width: int) -> str:
    return f"frames of {height} x {width}"


def unreadable(path: Path, error: Exception, where: str = "") -> ConfigError:
    """Words the error for a file that a reader gave up on."""
    what = " ".join(f"{type(error).__name__}: {message_of(error)}".split())[:DAMAGE_CHARS]
    kind = KINDS.get(path.suffix, "a ROS bag" if path.is_dir() else "a recording")
    if isinstance(error, OSError) and error.strerror:
        return ConfigError([f"{path}: cannot be read as {kind}: {error.strerror}"])
    remedy = REMEDIES.get(path.suffix, "copy or record it again")
    return ConfigError([f"{path}: cannot be read as {kind}: {where}{what}; if damaged, {remedy}"])
