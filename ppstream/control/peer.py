"""Peer: the other rank at the end of a control socket: typed frames, doorbells, typed death.

A frame (framing.py) holds one rank_messages.Control; an empty one carries descriptors and nothing
else. Tensors never travel here, and nothing here decides what a death means. How two ranks find
each other is ``rendezvous.py``; that a rank lives, whatever its loop does, is said on a second
socket, its heart (``heartbeat.py``).
"""

from __future__ import annotations

import array
import os
import select
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ppstream.control.framing import FrameReader, FrameSender
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import (
    MAX_TEXT,
    PeerFrozenError,
    PeerLeftError,
    PeerLostError,
    PpstreamError,
    ProtocolError,
    WatchdogError,
)
from ppstream.wire import rank_messages
from ppstream.wire.fields import DECODE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.core.clock import Clock

#: Of a wait in set-up: a longer one may miss a signal that another thread receives.
LOOK_NS: Final = NS_PER_S // 5
UNREAD_FRAMES_MAX: Final = 4096  # a peer that floods its reader breaks the contract
READS_PER_PUMP_MAX: Final = 64  # a flood cannot keep the caller inside pump()
FDS_MAX: Final = 8  # descriptors of one carrier frame
SEND_LIMIT_NS: Final = 2 * NS_PER_S


class Peer:
    """The other rank, at the end of a connected stream socket, which it owns.

    ``send``, ``offer`` and ``ring`` are for any thread; everything else belongs to the one thread
    that pumps.

    Attributes:
        bells: indices of envelopes that the peer rang for, oldest first; the loops of GPUs ring so.
        inbox: every other frame except heartbeats, oldest first; the owner takes them out.
        last_heard_ns: when the last frame was read, in this rank's clock; the owner moves it when
            the peer made progress that no frame tells of, the heartbeat when the heart beat.
        peer_progress: progress of the last heartbeat.
        bytes_read: bytes taken from the socket so far.
        frames_heard: frames taken from it so far, those that carry descriptors not among them.
        lost_ns: when the peer's end was first noticed; None while it lives.
        heart: the same rank at the end of its second socket, which only heartbeats and a goodbye
            go through; set while ranks meet. It belongs to the heartbeat, and closes with this one.
        listen: receives the peer's heartbeats; set by the heartbeat.

    Args:
        sock: a connected UNIX or TCP stream socket.
        name: how errors call the other side.
        expects_fds: the peer will pass descriptors (UNIX only).
        send_limit_ns: a peer that takes nothing for so long is lost.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        name: str = "the peer",
        expects_fds: bool = False,
        send_limit_ns: int = SEND_LIMIT_NS,
        clock: Clock = now_ns,
    ) -> None:
        sock.settimeout(0)
        self.name = name
        self.bells: deque[int] = deque()
        self.inbox: deque[rank_messages.Control] = deque()
        self.last_heard_ns = clock()
        self.peer_progress = 0
        self.bytes_read = self.frames_heard = 0
        self.lost_ns: int | None = None
        self.heart: Peer | None = None
        self.listen: Callable[[], None] | None = None
        self._socket = sock
        self._clock = clock
        self._send_limit_ns = send_limit_ns
        self._sender = FrameSender(sock, name, send_limit_ns)
        self._reader = FrameReader()
        self._end: PeerLostError | ProtocolError | None = None
        self._fds_due = expects_fds
        self._fds: deque[int] = deque()
        self._carriers = 0  # empty frames that came with descriptors, not yet passed over

    def fileno(self) -> int:
        """Readable: ``pump`` has something to do."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str | None:
        """Address of this end of a TCP socket; None: the peer is on this host (UNIX socket)."""
        if self._socket.family == socket.AF_UNIX:
            return None
        return str(self._socket.getsockname()[0])

    @property
    def frames_sent(self) -> int:
        """Frames that the other rank will hear, as it counts them in ``frames_heard``."""
        return self._sender.frames_sent

    @property
    def goodbye(self) -> rank_messages.Goodbye | None:
        """The peer's reason to leave, once it has sent one and this rank has read it."""
        heard = (*self.inbox, *(self.heart.inbox if self.heart is not None else ()))
        return next((frame for frame in heard if isinstance(frame, rank_messages.Goodbye)), None)

    def send(self, frame: rank_messages.Control) -> None:
        """Hand one frame to the kernel; waits only while the peer's buffer is full.

        A goodbye waits for nothing, and goes to the heart, too: the peer's loop may stand.

        Raises:
            PeerLostError: the peer is gone, or took nothing for ``send_limit_ns`` while its heart
                did not beat.
            ProtocolError: the frame is larger than ``frames.FRAME_BYTES_MAX``.
        """
        if isinstance(frame, rank_messages.Goodbye):
            frame = rank_messages.Goodbye(frame.code, frame.reason[:MAX_TEXT])
            if self.heart is not None:
                self.heart.offer(frame)
            self.offer(frame)
        else:
            self._send(frame)

    def ring(self, index: int) -> None:
        """Ring the doorbell: the slot data of ``index`` is complete. Raises as ``send``."""
        self._send(rank_messages.Bell(index))

    def offer(self, frame: rank_messages.Control) -> bool:
        """Hand one frame to the kernel if it has room now; returns False when it is dropped.

        Raises:
            PeerLostError: the peer is gone.
        """
        try:
            return self._sender.offer(frame)
        except PeerLostError:
            self.mark_lost()
            raise

    def send_fds(self, fds: Sequence[int]) -> None:
        """Pass descriptors (1 to ``FDS_MAX``, UNIX only, once); the caller may close its own then.

        Raises:
            PeerLostError: the peer is gone, or its buffer is full.
        """
        self._sender.send_fds(fds)

    def pump(self) -> None:
        """Read and sort all frames that are there, without waiting.

        What the peer said before its end is delivered first: the pump that finds the end behind new
        frames returns, the next one raises. Once raised, every later call raises the same.

        Raises:
            PeerLostError: the peer's end-of-file, or a connection error.
            ProtocolError: a frame is oversized or cannot be decoded, or too many are unread.
        """
        if self._end is not None:
            raise self._end
        heard = False
        try:
            for _ in range(READS_PER_PUMP_MAX):
                room = self._reader.room()
                taken = self._read(room)
                for data in self._reader.frames(taken):
                    self._handle(data)
                    heard = True
                if taken < len(room):
                    break
        except ProtocolError as error:
            self._end = error
            raise
        if heard:
            self.last_heard_ns = self._clock()
        elif self._end is not None:
            raise self._end

    def receive(self, timeout_ns: int, what: str = "a frame") -> rank_messages.Control:
        """The next frame of ``inbox``, waiting for it; for set-up, not for the loop.

        Args:
            timeout_ns: limit of the wait.
            what: the frame holds, for the error.

        Raises:
            PeerLeftError: the peer says that it leaves.
            PeerLostError: the peer is gone, or said nothing within ``timeout_ns``.
            WatchdogError: it said nothing within ``timeout_ns`` though its heartbeats arrive.
            ProtocolError: as ``pump``.
        """
        self._pump_until(lambda: bool(self.inbox), timeout_ns, what)
        frame = self.inbox.popleft()
        if isinstance(frame, rank_messages.Goodbye):
            raise PeerLeftError(frame.code, frame.reason)
        return frame

    def last_words(self, limit_ns: int = 0) -> PeerLeftError | None:
        """Returns the peer's reason to leave, if it sent one before its end was noticed.

        One that is not lost is given ``limit_ns`` to send it.
        """
        with suppress(PpstreamError):
            self.pump()
            if limit_ns and not self.lost_ns:
                self._pump_until(lambda: self.goodbye is not None, limit_ns, "its reason to leave")
        goodbye = self.goodbye
        return None if goodbye is None else PeerLeftError(goodbye.code, goodbye.reason)

    def receive_fds(self, count: int, timeout_ns: int) -> list[int]:
        """``count`` descriptors that the peer passed, close-on-exec, owned by the caller.

        Raises:
            PeerLostError: the peer is gone, or passed too few within ``timeout_ns``.
            ProtocolError: as ``pump``.
        """
        self._pump_until(lambda: len(self._fds) >= count, timeout_ns, f"{count} descriptors")
        return [self._fds.popleft() for _ in range(count)]

    def check_alive(self, now_ns: int, frozen_ns: int) -> None:
        """Raise when nothing was heard of it for ``frozen_ns``; to be asked only while waiting.

        What lies unread in its sockets counts as heard, so the owner may come from a long stage.

        Raises:
            PeerFrozenError: the peer was silent for longer.
            PeerLostError: as ``pump``.
            ProtocolError: as ``pump``.
        """
        if now_ns - self.last_heard_ns <= frozen_ns:
            return
        self.pump()
        if self.listen is not None:
            self.listen()
        silent_ns = now_ns - self.last_heard_ns
        if silent_ns > frozen_ns:
            self.mark_lost()
            raise PeerFrozenError(
                f"{self.name} was silent for {silent_ns / NS_PER_S:.2f} s, "
                f"limit {frozen_ns / NS_PER_S:.2f} s: {self._why_silent()}"
            )

    @property
    def has_ended(self) -> bool:
        """True when nothing more can be read: it closed, died, or sent what is no frame."""
        return self._end is not None

    def mark_lost(self) -> None:
        """Note that the peer is gone, now, unless it was noted before. Any thread."""
        if self.lost_ns is None:
            self.lost_ns = self._clock()

    def hang_up(self) -> None:
        """The peer's process is known to be gone: what it said can be read, then comes the end.

        Its socket alone may not say so: a process that it has forked holds it open. Any thread.
        """
        self.mark_lost()
        with suppress(OSError):  # the end was there
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close sockets, and descriptors nobody took. Stop its heartbeat first. Twice is fine."""
        if self.heart is not None:
            self.heart.close()
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _pump_until(self, there: Callable[[], bool], timeout_ns: int, what: str) -> None:
        deadline_ns = self._clock() + timeout_ns
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while not there():
            self.pump()
            if there():
                return
            left_ns = deadline_ns - self._clock()
            if left_ns <= 0:
                text = f"{self.name} did not send {what} within {timeout_ns / NS_PER_S:.1f} s"
                if self._is_beating():
                    raise WatchdogError(
                        f"{text} though its heartbeats arrive: its main thread is stuck"
                    )
                raise PeerLostError(text)
            readable.poll(min(left_ns, LOOK_NS) / NS_PER_MS)

    def _send(self, frame: rank_messages.Control) -> None:
        try:
            self._sender.send(frame, self._is_beating)
        except PeerLostError:
            self.mark_lost()
            raise

    def _is_beating(self) -> bool:
        """True when the peer's heart was heard a moment ago; not without one."""
        silent_ns = self._clock() - self.last_heard_ns
        return self.listen is not None and self.lost_ns is None and silent_ns < self._send_limit_ns

    def _why_silent(self) -> str:
        if self.local_host is None:
            return "it is stopped, or something holds its interpreter"
        return "its host, the network between or the process stands still, or is gone"

    def _read(self, room: memoryview) -> int:
        """Bytes read into ``room``; 0 when none are there or the end was reached."""
        try:
            taken = self._read_with_fds(room) if self._fds_due else self._socket.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._end = self._lost(f"{self.name} is gone: {error}")
            return 0
        if taken == 0:
            self._end = self._lost(f"{self.name} closed its control socket or died")
        self.bytes_read += taken
        return taken

    def _read_with_fds(self, room: memoryview) -> int:
        taken, ancillary, flags, _ = self._socket.recvmsg_into(
            [room], socket.CMSG_SPACE(FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
                self._fds_due = False  # one carrier; from here the cheaper call
                self._carriers += 1
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"{self.name} passed more than {FDS_MAX} descriptors")
        return taken

    def _handle(self, data: memoryview) -> None:
        if not data and self._carriers:
            self._carriers -= 1
            return
        self.frames_heard += 1
        try:
            frame = rank_messages.control.decode(data)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"{self.name} sent a frame that cannot be read: {error}") from error
        if type(frame) is rank_messages.Bell:
            self.bells.append(frame.index)
        elif type(frame) is rank_messages.Heartbeat:
            self.peer_progress = frame.progress
        else:
            self.inbox.append(frame)
        if len(self.bells) + len(self.inbox) > UNREAD_FRAMES_MAX:
            raise ProtocolError(f"{self.name} has more than {UNREAD_FRAMES_MAX} frames unread here")

    def _lost(self, why: str) -> PeerLostError:
        self.mark_lost()
        return PeerLostError(why)
