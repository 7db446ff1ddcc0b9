"""LiveView: publishes MCAP messages from a pipe on channels that WebSocket viewers subscribe to.

The server drops the oldest message of a viewer that is too slow. The only file that uses
``foxglove``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import IO, Any, Final

import foxglove
import msgspec
from foxglove.websocket import ChannelView, Client, ServerListener
from mcap.exceptions import EndOfFile, McapError
from mcap.records import Channel, Message, Schema
from mcap.stream_reader import StreamReader

from ppstream.core.errors import ConfigError
from ppstream.recording.mcap_schema import EVENTS_TOPIC, Event, json_schema

HOST: Final = "127.0.0.1"
STATE_TOPIC: Final = "/state"
BACKLOG: Final = 16, 1024  # messages that wait for one viewer: at least, and at most
BACKLOG_BYTES: Final = 64 << 20  # that they may have together, where these limits permit

encode: Final = msgspec.json.Encoder().encode
decode_event: Final = msgspec.json.Decoder(Event).decode


class State(msgspec.Struct):
    """The run's newest phase and verdict, published anew for each viewer that asks for it."""

    phase: str = ""
    degraded: bool = False
    epoch: int = 0
    verdict: str = ""  # of bring-up; empty: not judged yet
    overlap: float | None = None
    reasons: list[str] = []


def backlog(message_bytes: int) -> int:
    """Messages that may wait for one viewer when the largest have so many bytes."""
    least, most = BACKLOG
    return max(least, min(most, BACKLOG_BYTES // message_bytes))


def serve(pipe: IO[bytes], port: int, message_bytes: int) -> None:
    """Publish what the pipe brings, until it ends; print the address first.

    Args:
        pipe: MCAP with JSON messages.
        port: of loopback; 0: any free one.
        message_bytes: of the largest messages.

    Raises:
        ConfigError: the port is taken, or the pipe brings something else.
    """
    view = LiveView()
    try:
        server = foxglove.start_server(
            name="ppstream",
            host=HOST,
            port=port,
            server_listener=view,
            context=view.context,
            message_backlog_size=backlog(message_bytes),
        )
    except Exception as error:
        raise ConfigError([f"view.port: {HOST}:{port}: {error}"]) from error
    address = f"ws://{HOST}:{server.port}"
    print(f"ppstream: viewers connect to {address}", file=sys.stderr, flush=True)
    print("view", address, flush=True)
    try:
        for record in records(pipe):
            view.publish(record)
    except McapError as error:
        raise ConfigError([f"the pipe brings no MCAP: {error}"]) from error
    finally:
        server.stop()


def records(pipe: IO[bytes]) -> Iterator[Any]:
    """Whole records of MCAP, until the pipe ends; inside one, if the run was killed.

    Raises:
        McapError: the pipe brings something else.
    """
    whole: Any = _WholeReads(pipe)  # no IO[bytes] of the standard library's, but all that is used
    try:
        yield from StreamReader(whole).records
    except EndOfFile:
        return


class _WholeReads:
    """Reads of a pipe; one that its end cuts short is none."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe

    def read(self, length: int) -> bytes:
        data = self._pipe.read(length)
        if len(data) < length:
            raise EndOfFile
        return data


class LiveView(ServerListener):
    """Channels of one server: those of the records that it publishes, and the run's state.

    ``publish`` belongs to one thread; the server calls ``on_subscribe`` on its own.
    """

    def __init__(self) -> None:
        self.context = foxglove.Context()
        self._schemas: dict[int, foxglove.Schema] = {}
        self._channels: dict[int, foxglove.Channel] = {}
        self._events = 0  # number of their channel
        self._newest_ns = 0
        self._state = State()
        schema = foxglove.Schema(
            name="ppstream.State", encoding="jsonschema", data=json_schema(State)
        )
        self._states = self._channel(STATE_TOPIC, schema)

    def publish(self, record: Any) -> None:
        """Publish a message, keep a schema, open a channel; ignore other records."""
        match record:
            case Message(channel_id=number, data=data, log_time=log_ns):
                self._newest_ns = log_ns
                self._channels[number].log(data, log_time=log_ns)
                if number == self._events and self._follow(decode_event(data)):
                    self._publish_state()
            case Schema(id=number, name=name, encoding=encoding, data=data):
                self._schemas[number] = foxglove.Schema(name=name, encoding=encoding, data=data)
            case Channel(id=number, topic=topic, schema_id=schema):
                self._channels[number] = self._channel(topic, self._schemas[schema])
                if topic == EVENTS_TOPIC:
                    self._events = number

    def on_subscribe(self, client: Client, channel: ChannelView) -> None:
        """A viewer that comes late learns the state, which changes rarely."""
        if channel.topic == STATE_TOPIC:
            self._publish_state()

    def _follow(self, event: Event) -> bool:
        """True when the event has changed the state."""
        known = set(State.__struct_fields__) & set(event.fields)
        if event.name not in ("phase", "degraded", "epoch_cut", "verdict"):
            return False
        for name in known:
            setattr(self._state, name, event.fields[name])
        return True

    def _publish_state(self) -> None:
        self._states.log(encode(self._state), log_time=self._newest_ns)

    def _channel(self, topic: str, schema: foxglove.Schema) -> foxglove.Channel:
        return foxglove.Channel(topic, message_encoding="json", schema=schema, context=self.context)
