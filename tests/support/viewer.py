"""A viewer: a WebSocket client of the live view that subscribes to every channel."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from robot_rig import wait_until
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

MESSAGE = struct.Struct("<BIQ")  # opcode, subscription, log time
MESSAGE_DATA = 1
#: Of a channel that the server has told of and, on a busy machine, does not know itself yet.
UNKNOWN = re.compile(r"Unknown channel ID: (\d+)")
ADDRESS = re.compile(r"viewers connect to (\S+)")


class Viewer:
    """Keeps the schema and the messages of each topic, decoded."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.subprotocol = connection.subprotocol
        self.schemas: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}
        self.found: dict[str, list[dict[str, Any]]] = {}
        self.times: dict[str, list[int]] = {}
        self._topics: dict[int, str] = {}

    def read(self, limit_s: float = 10.0) -> None:
        """One frame of the server's."""
        frame = self._connection.recv(limit_s)
        if isinstance(frame, str):
            said = json.loads(frame)
            if said["op"] == "advertise":
                self._subscribe(said["channels"])
            elif unknown := UNKNOWN.search(said.get("message", "")):
                self._ask_for([int(unknown[1])])
            return
        opcode, subscription, time_ns = MESSAGE.unpack_from(frame)
        if opcode == MESSAGE_DATA:
            topic = self._topics[subscription]
            self.found[topic].append(json.loads(frame[MESSAGE.size :]))
            self.times[topic].append(time_ns)

    def _subscribe(self, channels: list[dict[str, Any]]) -> None:
        for channel in channels:
            assert (channel["encoding"], channel["schemaEncoding"]) == ("json", "jsonschema")
            topic = self._topics[channel["id"]] = channel["topic"]
            self.schemas[topic] = json.loads(channel["schema"])
            self.names[topic] = channel["schemaName"]
            self.found.setdefault(topic, [])
            self.times.setdefault(topic, [])
        self._ask_for([channel["id"] for channel in channels])

    def _ask_for(self, ids: list[int]) -> None:
        wanted = [{"id": one, "channelId": one} for one in ids]
        self._connection.send(json.dumps({"op": "subscribe", "subscriptions": wanted}))


@contextmanager
def viewing(address: str) -> Iterator[Viewer]:
    """A viewer that reads when it is told to; a few frames wait in its connection."""
    protocols = [Subprotocol("foxglove.sdk.v1")]
    unread = {"close_timeout": 1}  # frames stand before the server's farewell
    with connect(
        address, subprotocols=protocols, proxy=None, max_size=None, **unread
    ) as connection:
        yield Viewer(connection)


def address_in(output: Any) -> str:
    """Where viewers connect, as soon as ``output()`` says it."""
    wait_until(lambda: ADDRESS.search(output()), seconds=40)
    found = ADDRESS.search(output())
    assert found is not None
    return found[1]
