"""Heartbeat: a thread that tells the peer this process lives, and notices when the peer's does not.

It never reads the socket, so the frames stay the owner's, and it learns of a death while the owner
is busy in a long stage. Silence it does not judge: that is ``Peer.check_alive``.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Final

from ppstream import messages
from ppstream.clock import NS_PER_MS
from ppstream.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.control import Peer

STOP_LIMIT_S: Final = 5.0  # above the peer's send limit, the only wait inside the thread


class Heartbeat:
    """Sends a heartbeat every ``interval_ns`` from ``start`` to ``stop``.

    Args:
        peer: outlives the heartbeat: stop before closing it.
        interval_ns: between two heartbeats.
        progress: what this rank's loop has finished so far; called on the heartbeat's thread.
        on_lost: called once, on the heartbeat's thread, when the peer hung up or takes nothing;
            ``peer.lost_ns`` is set. Also after a peer that said Goodbye: the owner knows.
    """

    def __init__(
        self,
        peer: Peer,
        interval_ns: int,
        progress: Callable[[], int],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._peer = peer
        self._interval_ms = interval_ns / NS_PER_MS
        self._progress = progress
        self._on_lost = on_lost
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send the first heartbeat at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; twice is fine."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.ident is not None:
            self._thread.join(STOP_LIMIT_S)
        if not self._thread.is_alive():
            os.close(self._stop_fd)
            self._stop_fd = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        poll.register(self._peer.fileno(), select.POLLRDHUP)
        while True:
            try:
                self._peer.send(messages.Heartbeat(self._progress()))
            except PeerLostError:
                break
            ready = dict(poll.poll(self._interval_ms))
            if self._stop_fd in ready:
                return
            if ready:  # hang-up or error of the socket: nothing else was asked for
                break
        self._peer.mark_lost()
        if self._on_lost is not None:
            self._on_lost()
