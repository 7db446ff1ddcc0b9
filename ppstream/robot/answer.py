"""Answer and Asking: the chunk that ``RobotClient.ask`` returns, and an observation without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ppstream.core.errors import PeerLostError, PpstreamError
from ppstream.robot.chunk_playback import Actions
from ppstream.robot.timeline import Refusal
from ppstream.wire.robot_messages import ActionChunk

if TYPE_CHECKING:
    from ppstream.robot.connection import RobotLink


class Answer(NamedTuple):
    """Action chunk that came for an observation, as ``RobotClient.ask`` returns it.

    Attributes:
        chunk: with its window's end, steps and lease.
        actions: float32 ``[horizon, dim]``, sharing the chunk's memory.
        refusal: the reason why ``ActionTimeline.merge`` rejected the chunk, such as a late arrival;
            None: the timeline has the chunk.
    """

    chunk: ActionChunk
    actions: Actions
    refusal: Refusal | None


class Asking:
    """An observation that is waited for.

    Args:
        endpoint: of rank 0, for errors.
        link: that the answer comes over.
        stamp_ns: of all its samples.
        send: sends them; False: nobody can take them now.
    """

    def __init__(
        self, endpoint: str, link: RobotLink, stamp_ns: int, send: Callable[[], bool]
    ) -> None:
        self.link, self.stamp_ns = link, stamp_ns
        self.answer: Answer | None = None
        self._endpoint = endpoint
        self._send = send
        self._session = 0  # in which the samples were sent

    def send(self) -> bool:
        """Send the samples; False: nobody can take them now."""
        self._session = self.link.session.session
        return self._send()

    def awaits(self, chunk: ActionChunk) -> bool:
        """True of the first chunk of a window that ends at these samples, or later."""
        return self.answer is None and chunk.window_end_ns >= self.stamp_ns

    def is_answered(self) -> bool:
        """True once there is an answer."""
        return self.answer is not None

    def is_over(self) -> bool:
        """True once there is an answer, or none can come: its session is another one's."""
        return self.answer is not None or self._is_lost

    @property
    def _is_lost(self) -> bool:
        return self.link.session.session != self._session

    def result(self, timeout_s: float, *, is_sent: bool) -> Answer:
        """The answer, or an error as ``RobotClient.ask`` raises it.

        Args:
            timeout_s: how long it was waited for.
            is_sent: what ``send`` returned.
        """
        if self.answer is not None:
            return self.answer
        if self.link.is_closing:
            raise PpstreamError("this client was closed during ask()")
        run = self.link.session.run_text
        if not is_sent:
            raise PeerLostError(f"{self._endpoint}: rank 0 cannot receive samples now; {run}")
        if self.is_over():
            moves = ": this robot moves to the pipeline that its directory names"
            raise PeerLostError(
                f"{self.link.endpoint}: the session was lost before a chunk came; ask again"
                f"{'' if self.link.directory is None else moves}"
            )
        raise TimeoutError(
            f"no chunk of a window that ends at {self.stamp_ns} came within {timeout_s:g} s; "
            f"{run}; send a sample of each stream, the one that ends windows last, or allow more "
            "time"
        )
