"""Repeated actions: a replay's action chunks beside those that the recorded robot was sent.

Only bit for bit counts as equal. Nothing is replayed here: the replay has written its chunks
(``service.actions_file``), and the recording has the robot's. Windows that end at one stamp, as in
a simulator whose clock begins anew with each episode, are told apart by their order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.recording.load import read_numpy
from ppstream.recording.mcap_messages import EncodedMessage
from ppstream.recording.mcap_reader import read_mcap
from ppstream.recording.mcap_schema import (
    ACTIONS,
    WINDOWS,
    Chunk,
    WindowHeader,
    need_mcap,
    parse_topic,
)
from ppstream.recording.recording import unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIX: Final = ".mcap"  # of the recording
FIELDS: Final = ("window_end_ns", "actions")  # of the replay's file
DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    ACTIONS: msgspec.json.Decoder(Chunk),
    WINDOWS: msgspec.json.Decoder(WindowHeader),
}
REMEDY: Final = (
    "where they should be equal, repeat the run as it was recorded: the same batch.rows, weights, "
    'limits, device and machine, and frames as record.frames = "raw"'
)
MISSING: Final = (
    "a window without a chunk: replay with pipeline.windows = 'scheduled', and with --nproc 1, "
    "since with several ranks a reset drops what is in flight"
)
EMPTY: Final = "the replay holds no chunk at all: the run that wrote it ended before, and said why"


class Repeated(NamedTuple):
    """Counts the chunks that a robot was sent, by whether they came again."""

    robot: str
    chunks: int  # that it was sent
    equal: int  # bit for bit
    missing: int  # the replay has no chunk of this window
    largest: float  # difference of an action, in its unit; nan: another horizon or width
    replayed: int  # chunks that the replay holds

    @property
    def is_whole(self) -> bool:
        return 0 < self.chunks == self.equal

    @property
    def text(self) -> str:
        """For people: one line, and one for each remedy."""
        lines = [f"{self.equal} of {self.chunks} chunks of {self.robot} are equal bit for bit"]
        differing = self.chunks - self.equal - self.missing
        if differing:
            lines[0] += f", {differing} differ by up to {self.largest:.3g}"
            lines.append(REMEDY)
        if self.missing:
            lines[0] += f", {self.missing} are not in the replay"
            lines.append(MISSING if self.replayed else EMPTY)
        return "\n".join(lines)


def compare_actions(recording: Path, replay: Path, robot: str | None = None) -> Repeated:
    """Compare the chunks of ``recording`` with those of ``replay``, window by window.

    Args:
        recording: an MCAP file that a run wrote (``record.file``).
        replay: what a replay of it wrote (``service.actions_file``).
        robot: whose chunks, of a run with several robots.

    Raises:
        ConfigError: a file cannot be read or is not of that kind, or holds several robots' chunks
            and none was chosen.
    """
    sent = _sent(recording, robot)
    again = _again(replay)
    replayed = sum(map(len, again.values()))
    equal = missing = 0
    largest = 0.0
    for chunk in sent.chunks:
        place = sent.places.get((chunk.epoch, chunk.seq))
        found = again[chunk.window_end_ns]
        if place is None or place >= len(found):
            missing += 1
            continue
        mine, theirs = np.array(chunk.actions, np.float32), found[place].reshape(-1)
        if mine.tobytes() == theirs.tobytes():
            equal += 1
        elif mine.shape == theirs.shape:
            difference = np.abs(mine.astype(float) - theirs.astype(float)).max()
            largest = float(np.maximum(largest, difference))
        else:
            largest = float("nan")
    return Repeated(sent.robot, len(sent.chunks), equal, missing, largest, replayed)


class _Sent:
    """Chunks that a robot was sent, and its windows, which may have had none."""

    def __init__(self, robot: str) -> None:
        self.robot = robot
        self.chunks: list[Chunk] = []
        self.places: dict[tuple[int, int], int] = {}  # by epoch and seq, among those of one end
        self._ends = Counter[int]()

    def add(self, body: Chunk | WindowHeader) -> None:
        if isinstance(body, WindowHeader):
            self.places[body.epoch, body.seq] = self._ends[body.window_end_ns]
            self._ends[body.window_end_ns] += 1
        elif not body.dropped:
            self.chunks.append(body)


def _sent(path: Path, robot: str | None) -> _Sent:
    need_mcap()
    if path.suffix != SUFFIX:
        raise ConfigError([f"{path}: want the {SUFFIX} of a run (record.file) to compare with"])
    robots: dict[str, _Sent] = {}
    answered: set[str] = set()
    try:
        for found in read_mcap(path):
            parts = parse_topic(found.topic) if isinstance(found, EncodedMessage) else None
            if isinstance(found, EncodedMessage) and parts is not None and parts[1] in DECODERS:
                one = robots.setdefault(parts[0], _Sent(parts[0]))
                one.add(DECODERS[parts[1]].decode(found.data))
                if parts[1] == ACTIONS:
                    answered.add(parts[0])
    except (OSError, msgspec.MsgspecError) as error:
        raise unreadable(path, error) from error
    names = ", ".join(sorted(answered)) or "nobody"
    if robot is None and len(answered) > 1:
        raise ConfigError([f"record.robot: missing, want one of {names} in {path}"])
    chosen = robot if robot is not None else next(iter(answered), None)
    if chosen is None or chosen not in answered:
        raise ConfigError([f"{path}: has no actions of {chosen or 'a robot'}; recorded: {names}"])
    return robots[chosen]


def _again(path: Path) -> dict[int, list[NDArray[Any]]]:
    """The replay's chunks by the end of their window, in order."""
    try:
        arrays = read_numpy(path)
    except ConfigError:
        raise
    except Exception as error:  # what readers raise on damaged files has no end
        raise unreadable(path, error) from error
    if not isinstance(arrays, dict) or not arrays.keys() >= set(FIELDS):
        raise ConfigError([f"{path}: want the service.actions_file of a replay, with {FIELDS}"])
    ends_ns, actions = (arrays[name] for name in FIELDS)
    found = defaultdict[int, list[Any]](list)
    for end_ns, chunk in zip(ends_ns.tolist(), actions, strict=True):
        found[end_ns].append(chunk)
    return found
