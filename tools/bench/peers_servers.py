"""Servers as small as the peers' own: ZeroMQ REP, and a websocket that speaks openpi's protocol.

``python -m bench.peers_servers KIND ADDRESS WORK`` prints its address once it listens, and serves
until it is killed. Nobody checks, buffers, logs or decides anything.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from bench.peers_work import ON_GPU, Array, policy


def reply(address: str, work: str) -> None:
    """ZeroMQ: a request is a stamp and arrays, of which the last is the state."""
    import msgspec
    import zmq

    infer = policy(work)
    decode = msgspec.msgpack.Decoder(tuple[int, list[memoryview]]).decode
    encode = msgspec.msgpack.Encoder().encode
    socket: Any = zmq.Context().socket(zmq.REP)
    socket.bind(address)
    print(address, flush=True)
    while True:
        stamp_ns, arrays = decode(socket.recv())
        actions = infer(np.frombuffer(arrays[-1], np.float32))
        socket.send(encode((stamp_ns, [np.ascontiguousarray(actions).data])))


def openpi(address: str, work: str) -> None:
    """openpi: a frame of metadata, then observations and replies in turn, in its own msgpack."""
    from openpi_client import msgpack_numpy
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed

    if work in ON_GPU:
        from bench.policies import Unserved

        infer: Callable[[dict[str, Array]], Array] = Unserved(work)
    else:
        of_state = policy(work)

        def infer(observation: dict[str, Array]) -> Array:
            return of_state(observation["state"])[None]

    packer = msgpack_numpy.Packer()

    async def answer(connection: ServerConnection) -> None:
        await connection.send(packer.pack({}))
        with suppress(ConnectionClosed):  # their client says no goodbye
            while True:
                observation = msgpack_numpy.unpackb(await connection.recv())
                await connection.send(packer.pack({"actions": infer(observation)}))

    async def listen() -> None:
        options: dict[str, Any] = {"compression": None, "max_size": None}
        async with serve(answer, address, 0, **options) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            print(f"{address}:{port}", flush=True)
            await server.serve_forever()

    asyncio.run(listen())


if __name__ == "__main__":
    {"reply": reply, "openpi": openpi}[sys.argv[1]](sys.argv[2], sys.argv[3])
