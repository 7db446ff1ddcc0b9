"""Messages between robots and a fleet's directory: JSON over HTTP, both ends of it.

``GET /v1/resolve?robot=NAME&avoid=PIPELINE`` is answered by ``Resolved`` (200) or ``Unresolved``
(503). The directory chooses a pipeline; whether its key is trusted is for the robot to say.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ppstream.wire.fields import MAX_NAME

RESOLVE: Final = "/v1/resolve"
STATUS: Final = "/v1/status"
ANSWER_BYTES_MAX: Final = 1 << 16

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline that has a row for the robot; the row is kept for ``ttl_s``.

    ``server_key``: 40 characters of Z85; None where the endpoint is on this host.
    """

    pipeline: Name
    endpoint: str
    server_key: str | None = None
    ttl_s: float


class Unresolved(msgspec.Struct, frozen=True):
    """No pipeline now: ``full``, or none that serves."""

    reason: Literal["full", "none_serves"]
    details: str
