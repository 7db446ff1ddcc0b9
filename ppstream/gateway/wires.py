"""The contract of a foreign wire: a file of this package, named after the wire, with two functions.

``config/gateway_rules.py`` has its rules beside those of the others (``WIRES``), the schema its
name. A wire's libraries are imported by its own file alone.
"""

from __future__ import annotations

import ssl
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from ppstream.config.schema import GatewayConfig, PipelineConfig
    from ppstream.gateway.request_log import RequestCounts
    from ppstream.gateway.shared_server import HandedOver

PACKAGE: Final = "ppstream.gateway"
SPARE_SESSIONS: Final = 8  # beyond the rows: those that a robot has just left, and refused ones
SPARE_SOCKETS: Final = 64  # beyond those: opening handshakes and health


def sessions_max(config: PipelineConfig) -> int:
    """Robots of one gateway at once, among them those that are being refused or have just left."""
    return config.batch.rows + SPARE_SESSIONS


def sockets_max(config: PipelineConfig) -> int:
    """Connections of one gateway at once, whatever they are for."""
    return sessions_max(config) + SPARE_SOCKETS


class Access(NamedTuple):
    """Proofs that a server asks of its robots, and shows them; and where it listens."""

    api_key: str | None = None  # that a robot must know; None: none
    tls: ssl.SSLContext | None = None  # None: not encrypted
    #: Listens in place of the configured address, of wires whose rules say ``is_shared``.
    connections: HandedOver | None = None


class WireServer(Protocol):
    """One ``[[gateway]]``: an asynchronous context manager that serves inside.

    Entering raises ``OSError`` when the address cannot be bound.
    """

    @property
    def address(self) -> str:
        """Address that clients of this host connect to."""

    async def __aenter__(self) -> WireServer: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Wire(Protocol):
    """Contents of the file of a wire."""

    def build(
        self,
        config: PipelineConfig,
        gateway: GatewayConfig,
        access: Access,
        requests: RequestCounts,
    ) -> WireServer:
        """The server of a checked configuration, not yet listening; it counts its requests.

        Raises:
            ConfigError: keys for rank 0 cannot be read.
        """

    def describe(self, config: PipelineConfig, gateway: GatewayConfig) -> str:
        """The map, and a client that fits it, for people."""


def wire_of(gateway: GatewayConfig) -> Wire:
    """The file of a gateway's wire."""
    return cast("Wire", import_module(f"{PACKAGE}.{gateway.wire}"))
