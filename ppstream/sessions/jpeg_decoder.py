"""FrameDecoder: JPEG frames of robots' cameras to samples, on threads of its own.

Of each camera the newest frame counts: one that waits is replaced by the next. Pillow decodes, and
lets other threads run meanwhile. Which ring a frame goes to, and whether its robot is still here,
is for ``server.py`` to say.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.core.clock import now_ns
from ppstream.wire.jpeg import decode, is_installed

if TYPE_CHECKING:
    from ppstream.sessions.session import Session, SessionStream

THREADS_MAX: Final = 4
JOIN_S: Final = 2.0


class EncodedFrame(NamedTuple):
    """One frame as it came; ``rx_ns`` is its arrival, so that decoding counts in its age."""

    session: Session
    episode: int
    stream: SessionStream
    stamp_ns: int
    jpeg: bytes
    rx_ns: int


class DecodedFrame(NamedTuple):
    """``values`` is ``[1, dim]`` uint8; None: the bytes are no such frame."""

    frame: EncodedFrame
    values: np.ndarray[Any, Any] | None
    decode_ns: int


def decoder_problem() -> str | None:
    """Returns the reason why no JPEG can be decoded here, and what to do; None: it can be."""
    if not is_installed():
        return "rank 0 has no JPEG decoder: pip install 'ppstream[camera]' there, or send raw"
    return None


class FrameDecoder:
    """Threads that decode; started with the first frame.

    ``submit`` and ``take`` are the owner's.

    Args:
        wake: called from a decoding thread when there is something to take.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.done: deque[DecodedFrame] = deque()
        self._lanes: list[_Lane] = []

    def submit(self, frame: EncodedFrame) -> bool:
        """Have ``frame`` decoded; False when it replaces one that was still waiting."""
        if not self._lanes:
            count = min(THREADS_MAX, os.cpu_count() or 1)
            self._lanes = [_Lane(self._finished) for _ in range(count)]
        key = (frame.session.id, id(frame.stream))
        return self._lanes[hash(key) % len(self._lanes)].put(key, frame)

    def drain(self) -> list[DecodedFrame]:
        """Returns what was decoded since the last call, in order for each camera."""
        done = []
        while self.done:
            done.append(self.done.popleft())
        return done

    def close(self) -> None:
        """End the threads; what waits is forgotten."""
        for lane in self._lanes:
            lane.close()
        self._lanes = []

    def _finished(self, decoded: DecodedFrame) -> None:
        self.done.append(decoded)
        self._wake()


class _Lane:
    """One thread and the cameras it serves, so that the frames of each stay in order."""

    def __init__(self, finished: Callable[[DecodedFrame], None]) -> None:
        self._finished = finished
        self._changed = threading.Condition()
        self._waiting: dict[object, EncodedFrame] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ppstream-jpeg", daemon=True)
        self._thread.start()

    def put(self, key: object, frame: EncodedFrame) -> bool:
        with self._changed:
            is_first = key not in self._waiting
            self._waiting[key] = frame
            self._changed.notify()
        return is_first

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                frame = self._waiting.pop(next(iter(self._waiting)))
            began_ns = now_ns()
            image = frame.stream.ring.stream.image
            values = None if image is None else decode(frame.jpeg, image.height, image.width)
            self._finished(DecodedFrame(frame, values, now_ns() - began_ns))
