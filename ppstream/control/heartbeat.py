"""HeartbeatThread: sends this process's heartbeat, and notices when the peer's stops.

It has a socket of its own, the peer's ``heart``: neither side's loop reads or fills it, so a main
thread that builds, compiles or captures for minutes is no dead process. Silence it only measures:
what that means is ``Peer.check_alive``.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, POLL_NS_MAX, now_ns
from ppstream.core.errors import PpstreamError
from ppstream.wire import rank_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.control.peer import Peer
    from ppstream.control.peer_process import HeldProcess
    from ppstream.core.clock import Clock

STOP_LIMIT_S: Final = 5.0
AWAY_BEATS: Final = 2  # so long without a look, this process was stopped, or its interpreter held


class HeartbeatThread:
    """Sends a heartbeat every ``interval_ns`` from ``start`` to ``stop``, and receives the peer's.

    A heartbeat that finds the socket full is dropped: what lies unread there says the same.

    Args:
        peer: outlives the heartbeat: stop before closing it. Its ``heart`` is used here alone.
        interval_ns: between two heartbeats.
        progress: what this rank's loop has finished so far; called on the heartbeat's thread.
        on_lost: called once, on the heartbeat's thread, when the peer hung up or its process
            ended; ``peer.lost_ns`` is set. Also after a peer that said Goodbye: the owner knows.
        process: the peer's, if it is on this host: its end is noticed though a process that it
            has forked holds its sockets open.
    """

    def __init__(
        self,
        peer: Peer,
        interval_ns: int,
        progress: Callable[[], int],
        on_lost: Callable[[], None] | None = None,
        process: HeldProcess | None = None,
        *,
        clock: Clock = now_ns,
    ) -> None:
        assert peer.heart is not None, "a peer without a heart: ranks have not met"
        self._peer = peer
        self._heart = peer.heart
        self._interval_ns = interval_ns
        self._progress = progress
        self._on_lost = on_lost
        self._process = process
        self._clock = clock
        self._listening = threading.Lock()
        self._listened_ns = clock()
        peer.listen = self.listen
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send the first heartbeat at once; the peer's silence counts from now on."""
        self._peer.last_heard_ns = self._listened_ns = self._clock()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; twice is fine."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_LIMIT_S)
        if not self._thread.is_alive():
            os.close(self._stop_fd)
            self._stop_fd = -1
            self._peer.listen = None

    def listen(self) -> None:
        """Read what the heart has said, and move ``peer.last_heard_ns``; any thread.

        Time in which this process could not listen is no silence of the peer.

        Raises:
            PeerLostError: the heart's end-of-file.
            ProtocolError: it said what cannot be read.
        """
        with self._listening:
            now = self._clock()
            away_ns, self._listened_ns = now - self._listened_ns, now
            if away_ns > AWAY_BEATS * self._interval_ns:
                self._peer.last_heard_ns = min(now, self._peer.last_heard_ns + away_ns)
            before = self._heart.bytes_read
            self._heart.pump()
            if self._heart.bytes_read != before:
                self._peer.last_heard_ns = now
                self._peer.peer_progress = self._heart.peer_progress

    def _run(self) -> None:
        if self._stopped.is_set():  # while this thread was being started
            return
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        poll.register(self._heart.fileno(), select.POLLIN | select.POLLRDHUP)
        if self._process is not None:
            poll.register(self._process.fileno(), select.POLLIN)
        due_ns = self._clock()
        while True:
            try:
                if self._clock() >= due_ns:
                    self._heart.offer(rank_messages.Heartbeat(self._progress()))
                    due_ns = self._clock() + self._interval_ns
                left_ns = min(max(0, due_ns - self._clock()), POLL_NS_MAX)
                ready = dict(poll.poll(left_ns / NS_PER_MS))
                if self._stop_fd in ready:
                    return
                self.listen()
            except PpstreamError:
                break
            if self._process is not None and self._process.fileno() in ready:
                break
        self._peer.mark_lost()
        if self._process is not None and self._process.wait_gone(0):
            self._peer.hang_up()
        if self._on_lost is not None:
            self._on_lost()
