"""Recording: sensor streams read from a file, as they were recorded.

Read here are ``.npz`` with ``<stream>.stamps_ns`` (int64 ``[n]``) and ``<stream>.values`` (floats
``[n, dim]``) for each stream, and the ``.npy`` table of a Franka arm; ``mcap_reader.py``,
``ulog_reader.py`` and ``ros_reader.py`` read others. Nothing is repaired: gaps, repeats and
disorder are what a replay is for. Who plays it is ``sources.py`` (rank 0) or ``tools/replay.py``
(as a robot); no torch here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.core.user_code import said

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig

DAMAGE_CHARS: Final = 300
KINDS: Final = {".mcap": "MCAP", ".bag": "a ROS bag", ".ulg": "ULog"}
#: For a file that is damaged, by its suffix.
REMEDIES: Final = {
    ".mcap": "`mcap recover FILE` keeps what is whole",
    ".bag": "`rosbag reindex FILE` may mend it, or copy it again",
}
STAMPS_KEY: Final = ".stamps_ns"
VALUES_KEY: Final = ".values"

#: Columns of the Franka table: 0 is the stamp (float64 of nanoseconds, so 256 ns coarse).
FRANKA_COLUMNS: Final = {
    "q": slice(1, 8),  # rad
    "dq": slice(8, 15),  # rad/s
    "tau": slice(15, 22),  # Nm
    "tau_ext": slice(22, 29),  # Nm
    "ee_pose": slice(29, 36),  # m, quaternion
}
FRANKA_WIDTH: Final = 42


class Track(NamedTuple):
    """One stream of a recording, in the order it was recorded."""

    stamps_ns: NDArray[np.int64]  # [n], n >= 1, robot clock
    values: NDArray[Any]  # [n, dim] float32 or float64
    arrivals_ns: NDArray[np.int64] | None = None  # [n], when each came, in the robot's clock, too

    @property
    def due_ns(self) -> NDArray[np.int64]:
        """When each sample is played: as it came, else at its stamp; never before one ahead."""
        return np.maximum.accumulate(
            self.stamps_ns if self.arrivals_ns is None else self.arrivals_ns
        )


class Step(NamedTuple):
    """A moment of a recorded run: a window was cut, or the robot's history was emptied."""

    end_ns: int | None  # of the window, robot clock; None: emptied
    reason: str  # why it was emptied
    samples: Mapping[str, int]  # that had come before, by stream


class Message(NamedTuple):
    """Consecutive samples of one stream, to be sent together."""

    due_ns: int  # of its last sample
    stream: str
    stamps_ns: NDArray[np.int64]
    values: NDArray[Any]


class Recording:
    """Tracks by stream name; of a run, the steps that can be repeated, and what was lost of it."""

    def __init__(
        self,
        tracks: Mapping[str, Track],
        steps: Sequence[Step] = (),
        lost: Mapping[str, int] | None = None,
        robot: str = "",
    ) -> None:
        self.tracks = dict(tracks)
        self.robot = robot  # its name, if that was recorded
        self.steps = tuple(steps)
        self.lost = dict(lost or {})

    @property
    def first_ns(self) -> int:
        """The earliest time at which a sample is due."""
        return min(int(track.due_ns[0]) for track in self.tracks.values())

    @property
    def last_ns(self) -> int:
        """The time at which the last sample is due."""
        return max(int(track.due_ns[-1]) for track in self.tracks.values())

    def select(self, streams: Sequence[StreamConfig]) -> Recording:
        """The declared streams, in their order and dtype.

        Raises:
            ConfigError: a stream is not recorded, or has another width.
        """
        problems = []
        chosen = {}
        for stream in streams:
            track = self.tracks.get(stream.name)
            if track is None:
                recorded = ", ".join(self.tracks)
                problems.append(f"streams: {stream.name!r} is not recorded, want one of {recorded}")
            elif track.values.shape[1] != stream.dim:
                problems.append(
                    f"streams: {stream.name!r} has dim {stream.dim}, recorded are "
                    f"{track.values.shape[1]} values per sample"
                )
            else:
                values = track.values.astype(stream.dtype, copy=False)
                chosen[stream.name] = track._replace(values=values)
        if problems:
            raise ConfigError(problems)
        return Recording(chosen, self.steps, self.lost, self.robot)

    def messages(self, batch_ns: int) -> Iterator[Message]:
        """All samples in order of time; those of one stream within ``batch_ns`` go together.

        0 sends each alone. The arrays are views.
        """
        parts = [self._messages_of(name, batch_ns) for name in self.tracks]
        return heapq.merge(*parts, key=lambda message: message.due_ns)

    def _messages_of(self, stream: str, batch_ns: int) -> Iterator[Message]:
        track = self.tracks[stream]
        due_ns = track.due_ns
        begin = 0
        while begin < len(due_ns):
            end = begin + 1
            if batch_ns > 0:
                end = int(due_ns.searchsorted(due_ns[begin] + batch_ns, "left"))
            samples = slice(begin, end)
            last_ns = int(due_ns[end - 1])
            yield Message(last_ns, stream, track.stamps_ns[samples], track.values[samples])
            begin = end


def load_recording(
    path: str | Path, streams: Sequence[StreamConfig] = (), robot: str | None = None
) -> Recording:
    """The recording in ``path``.

    Args:
        path: ``.npz``, ``.npy``, ``.mcap``, PX4's ``.ulg``, ROS 1's ``.bag``, a ROS 2 bag's folder.
        streams: where files made by others have them (``recorded``).
        robot: whose samples, of a run with several robots.

    Raises:
        ConfigError: the file cannot be read, is damaged or not of a known form, or needs a package
            that is missing; with every problem found.
    """
    path = Path(path)
    try:
        return _load(path, streams, robot)
    except ConfigError:
        raise
    except Exception as error:  # what readers raise on damaged files has no end
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception, where: str = "") -> ConfigError:
    """What to say of a file that a reader gave up on."""
    what = " ".join(f"{type(error).__name__}: {said(error)}".split())[:DAMAGE_CHARS]
    kind = KINDS.get(path.suffix, "a ROS bag" if path.is_dir() else ".npz or .npy")
    if isinstance(error, OSError) and error.strerror:
        return ConfigError([f"{path}: cannot be read as {kind}: {error.strerror}"])
    remedy = REMEDIES.get(path.suffix, "copy or record it again")
    return ConfigError([f"{path}: cannot be read as {kind}: {where}{what}; if damaged, {remedy}"])


def _load(path: Path, streams: Sequence[StreamConfig], robot: str | None) -> Recording:
    if path.is_dir() or path.suffix == ".bag":
        from ppstream.recording.ros_reader import load_bag

        return load_bag(path, streams)
    if path.suffix == ".mcap":
        from ppstream.recording.mcap_reader import load_mcap

        return load_mcap(path, streams, robot)
    if path.suffix == ".ulg":
        from ppstream.recording.ulog_reader import load_ulog

        return load_ulog(path, streams)
    return _load_numpy(path)


def _load_numpy(path: Path) -> Recording:
    with path.open("rb") as file:
        found = np.load(file, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            found = dict(found)
    if isinstance(found, np.ndarray):
        return Recording(_franka_tracks(path, found))
    return Recording(_npz_tracks(path, found))


def _franka_tracks(path: Path, table: NDArray[Any]) -> dict[str, Track]:
    if (
        table.ndim != 2
        or table.shape[1] != FRANKA_WIDTH
        or table.dtype != np.float64
        or not len(table)
    ):
        raise ConfigError(
            [
                f"{path}: got {table.dtype} {list(table.shape)}, want a Franka table, "
                f"float64 [n, {FRANKA_WIDTH}]; save other recordings as .npz"
            ]
        )
    stamps_ns = table[:, 0].astype(np.int64)
    return {name: Track(stamps_ns, table[:, columns]) for name, columns in FRANKA_COLUMNS.items()}


def _npz_tracks(path: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Track]:
    names = [key.removesuffix(STAMPS_KEY) for key in arrays if key.endswith(STAMPS_KEY)]
    problems = []
    tracks = {}
    for name in names:
        stamps_ns, values = arrays[name + STAMPS_KEY], arrays.get(name + VALUES_KEY)
        if values is None:
            problems.append(f"{path}: {name}{VALUES_KEY} is missing")
        elif stamps_ns.dtype != np.int64 or stamps_ns.ndim != 1 or not len(stamps_ns):
            problems.append(f"{path}: {name}{STAMPS_KEY} is not int64 [n] with a sample in it")
        elif values.ndim != 2 or len(values) != len(stamps_ns) or values.dtype.kind != "f":
            problems.append(f"{path}: {name}{VALUES_KEY} is not floats [{len(stamps_ns)}, dim]")
        else:
            tracks[name] = Track(stamps_ns, values)
    if not names:
        problems.append(
            f"{path}: no stream found; want keys <stream>{STAMPS_KEY} and <stream>{VALUES_KEY}"
        )
    if problems:
        raise ConfigError(problems)
    return tracks
