"""RefusedConnections: tells rank 0's console of connections that its keys turn away.

Who is refused hears nothing: to a robot with a wrong key the run looks as if it were starting.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from ppstream.config.schema import ServiceConfig
from ppstream.core.clock import NS_PER_S

logger = logging.getLogger("ppstream")

SAID_NS: Final = 600 * NS_PER_S  # between two words on the same reason: anybody may connect


class RefusedConnections:
    """Says each reason with its first connection, and again when more came some minutes later."""

    def __init__(self, service: ServiceConfig) -> None:
        self._endpoint = service.endpoint
        allowed, secret = service.allowed_keys, service.secret_key
        self._remedies = {
            "key": f"the key is not in {allowed}; 'ppstream keys allow {allowed} NAME KEY' adds "
            "one for the next start",
            "handshake": "this endpoint has no keys; leave them out on the robot, if it is one"
            if secret is None
            else "a connection without keys, or for the key of another server; give the robot, if "
            f"it is one, its own key and the one that 'ppstream keys public {secret}' prints",
        }
        self._said = dict.fromkeys(self._remedies, 0)
        self._due_ns = dict.fromkeys(self._remedies, 0)

    def note(self, refused: Mapping[str, int], now_ns: int) -> None:
        """Say what is new among the counts of all refused connections, by reason."""
        for reason, remedy in self._remedies.items():
            count = refused.get(reason, 0)
            if count > self._said[reason] and now_ns >= self._due_ns[reason]:
                self._said[reason], self._due_ns[reason] = count, now_ns + SAID_NS
                text = "%s: connections refused (%s): %d so far: %s"
                logger.warning(text, self._endpoint, reason, count, remedy)
