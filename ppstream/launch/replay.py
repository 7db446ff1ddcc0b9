"""``ppstream replay FILE``: streams a recording as a robot would, or compares its actions.

Samples go out with their recorded stamps, at real speed, faster or slower, or (``--speed max``) as
fast as they are accepted. The robot's clock is the recording's. Each action chunk that comes back
is taken at once and moves nothing. Needs the robot-side packages only, no torch.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ppstream.config.load import add_arguments, load
from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, PeerLostError, PpstreamError
from ppstream.recording.load import FORMS, load_recording
from ppstream.recording.recording import CLOCK_JUMP, Piece, RecordedMessage, Recording
from ppstream.recording.repeated_actions import compare_actions
from ppstream.robot.client import RobotClient
from ppstream.wire.robot_messages import ActionChunk

REFUSED_PAUSE_S: Final = 0.001  # between two attempts while nobody can take samples
REFUSED_LIMIT_S: Final = 10.0  # longer than a restart of the server takes
DIFFERS: Final = 1  # exit code
SAME_CLOCK_NS: Final = NS_PER_S  # by more a robot's clock began anew, by less samples were late
LAST_CHUNK_S: Final = 0.3  # for that of the last window, if none was dropped


class ReplayClock:
    """The recording's time, as a robot's clock; at ``max`` the time reached by the samples sent."""

    def __init__(self, first_ns: int, speed: float | None) -> None:
        self._reached_ns = first_ns
        self._first_ns = first_ns
        self._speed = speed
        self._started_ns: int | None = None
        self._ahead_ns = 0  # of the recording's time, since the robot's clock began anew

    def __call__(self) -> int:
        return self._recorded_ns() + self._ahead_ns

    def _recorded_ns(self) -> int:
        if self._speed is None or self._started_ns is None:
            return self._reached_ns
        return self._first_ns + int((now_ns() - self._started_ns) * self._speed)

    def start(self) -> None:
        self._started_ns = now_ns()

    def begin(self, piece: Piece) -> None:
        """Sleep until the piece is due, and go on with its clock."""
        self.wait_until(piece.begin_ns + self._ahead_ns)
        self._ahead_ns = piece.recording.first_ns - piece.begin_ns

    def wait_until(self, due_ns: int) -> None:
        """Sleep until the robot's clock is ``due_ns``; at ``max`` it is so at once."""
        due_ns -= self._ahead_ns
        self._reached_ns = max(self._reached_ns, due_ns)
        if self._speed is not None:
            while (left_ns := due_ns - self._recorded_ns()) > 0:
                time.sleep(left_ns / self._speed / NS_PER_S)


def play(
    client: RobotClient, pieces: Sequence[Piece], clock: ReplayClock, batch_ns: int, *, insist: bool
) -> None:
    """Push every sample when it is due, those of a stream within ``batch_ns`` together.

    Between two pieces the robot begins a new episode, unless only its clock jumped. ``insist``:
    offer samples that nobody can take now again, so that nothing runs ahead of the server.
    Otherwise they are lost and counted, as a robot's are.

    Raises:
        PeerLostError: insisting did not help.
    """
    clock.start()
    for piece in pieces:
        clock.begin(piece)
        if piece is not pieces[0] and _is_episode(piece):
            client.reset()
        for message in piece.recording.messages(batch_ns):
            clock.wait_until(message.due_ns)
            if not client.push(message.stream, message.stamps_ns, message.values) and insist:
                _insist(client, message)


def _is_episode(piece: Piece) -> bool:
    return not piece.reasons <= {CLOCK_JUMP}  # which rank 0 notices again by itself


def _insist(client: RobotClient, message: RecordedMessage) -> None:
    give_up_ns = now_ns() + int(REFUSED_LIMIT_S * NS_PER_S)
    while not client.push(message.stream, message.stamps_ns, message.values):
        if now_ns() > give_up_ns:
            raise PeerLostError(f"no sample was accepted for {REFUSED_LIMIT_S:g} s; is it running?")
        time.sleep(REFUSED_PAUSE_S)


def replay(arguments: argparse.Namespace, config: PipelineConfig) -> str:
    """Replay the whole file; returns what to tell about it."""
    _say(f"reads {arguments.file}")  # with cameras at some 300 MB/s
    recording = load_recording(arguments.file, config.streams, config.record.robot)
    recording = recording.select(config.streams)
    pieces = recording.between_resets(SAME_CLOCK_NS)
    clock, is_over = ReplayClock(recording.first_ns, arguments.speed), threading.Event()
    last_ns = max(pieces[-1].recording.tracks[config.reference.name].stamps_ns, default=0)
    last_epoch = sum(map(_is_episode, pieces[1:]))

    def take(chunk: ActionChunk) -> None:
        client.executed(chunk, clock())
        if chunk.window_end_ns >= last_ns and chunk.session_epoch == last_epoch:
            is_over.set()

    client = RobotClient(
        arguments.endpoint or _endpoint(config),
        robot=arguments.robot,
        streams=[(stream.name, stream.dim, stream.dtype) for stream in config.streams],
        actions=config.actions.names,
        on_chunk=take,
        clock=clock,
        real_time=arguments.speed == 1.0,
    )
    with client:
        client.connect(arguments.wait_s, say=_say)
        if not client.wait_ready(arguments.wait_s, say=_say):
            raise PeerLostError(
                f"phase is {client.phase!r} after {arguments.wait_s:g} s, not ready"
            )
        began_ns = now_ns()
        batch_ns = round(arguments.batch_ms * NS_PER_MS)
        play(client, pieces, clock, batch_ns, insist=arguments.speed is None)
        took_s = (now_ns() - began_ns) / NS_PER_S
        is_over.wait(LAST_CHUNK_S)  # no longer: a robot that stays is without a new chunk
    return _summary(client, recording, took_s)


def _compare(arguments: argparse.Namespace, config: PipelineConfig) -> int:
    found = compare_actions(arguments.file, arguments.compare, config.record.robot)
    print(found.text)
    return 0 if found.is_whole else DIFFERS


def _say(text: str) -> None:
    print(f"replay: {text}", file=sys.stderr, flush=True)


def _endpoint(config: PipelineConfig) -> str:
    if config.service.endpoint is None:
        raise ConfigError(["service.endpoint: none is configured; give --endpoint"])
    return config.service.endpoint


def _summary(client: RobotClient, recording: Recording, took_s: float) -> str:
    statistics = client.statistics()
    played_s = (recording.last_ns - recording.first_ns) / NS_PER_S
    age = statistics.age
    samples = sum(len(track.stamps_ns) for track in recording.tracks.values())
    p50_ms, p99_ms, max_ms = (ns / NS_PER_MS for ns in (age.p50_ns, age.p99_ns, age.max_ns))
    lines = [
        f"replayed {played_s:.2f} s of {', '.join(recording.tracks)} in {took_s:.2f} s",
        f"samples: {samples} recorded, {statistics.sent} sent at {samples / took_s:.0f}/s, "
        f"{statistics.unsent} not accepted when offered",
        f"action chunks: {statistics.timeline.received} received, {age.count} taken; observation "
        f"to action p50 {p50_ms:.1f}, p99 {p99_ms:.1f}, max {max_ms:.1f} ms in recorded time",
    ]
    return "\n".join(lines)


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    speed = float(text)
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, want a number above 0, or max")
    return speed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream replay",
        description="Stream a recording as a robot would, to a run that serves; or compare its "
        "actions with a replay's.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording: " + FORMS)
    parser.add_argument(
        "--compare",
        metavar="NPZ",
        type=Path,
        help="stream nothing: say whether a replay's service.actions_file has the recording's "
        "actions bit for bit; exit code 1 when it has not",
    )
    parser.add_argument("--endpoint", help="where rank 0 listens (default: service.endpoint)")
    parser.add_argument(
        "--speed", type=_speed, default=1.0, help="times real time, or max (default: 1)"
    )
    parser.add_argument(
        "--batch-ms", type=float, default=5.0, help="samples sent together (default: %(default)g)"
    )
    parser.add_argument(
        "--robot", default="replay", help="this robot's name (default: %(default)s)"
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=600.0,
        help="for a session that is ready (default: %(default)g)",
    )
    add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where actions differ, or an error's, which is on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        config = load(arguments)
        if arguments.compare is not None:
            return _compare(arguments, config)
        print(replay(arguments, config))
    except PpstreamError as error:
        print(f"replay: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
