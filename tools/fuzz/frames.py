"""Hostile bytes at every door: robots' frames, control frames between ranks, raw connections.

``python tools/fuzz/frames.py`` sends a million mutated frames, half to Sessions over a real socket
and half to the control socket between ranks; thousands of broken connections to an encrypted and
to a plain endpoint; packets with strange descriptors to a ``unix://`` endpoint; mutated pickles,
attacks among them, to the reader that never unpickles. Whatever comes must be counted; nothing may
raise what is not promised, and a robot that behaves must be served throughout: else it ends with a
traceback and code 1.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/
sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installation


import zmq
from fuzz.mutations import HOSTILE, mutated
from fuzz.pickles import fuzz_pickles
from fuzz.robots import HANG_S, HOSTILE_SHARE, fuzz_sessions

from ppstream.control.framing import LENGTH
from ppstream.control.peer import Peer
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError, ProtocolError
from ppstream.wire import rank_messages
from ppstream.wire.fields import encoder
from ppstream.wire.keys import ServerKeys
from ppstream.wire.message_memory import CARRIER, CARRIER_BYTES, MAGIC, SEALS
from ppstream.wire.message_socket import MessageSocket
from ppstream.wire.transports import bind_server, connect_client

FRAMES: Final = 1_000_000
CONNECTIONS: Final = 2_000
PICKLES: Final = 100_000
PACKETS: Final = 10  # of a unix:// endpoint, for each of the connections
MEMORY_BYTES: Final = 10_000  # of a carrier's memory, at most
#: A peer of ZMTP 3.0 says hello: signature, version; then its mechanism, and what it is.
SIGNATURE: Final = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"
MECHANISMS: Final = (b"NULL", b"CURVE", b"PLAIN", b"GSSAPI")
READY: Final = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
HUGE: Final = b"\2" + struct.pack(">Q", 1 << 31)  # a frame of 2 GiB is announced


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--frames", type=int, default=FRAMES, help="in all")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="in all")
    parser.add_argument("--pickles", type=int, default=PICKLES, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    half = options.frames // 2
    found: dict[str, dict[str, int]] = {}
    parts: tuple[tuple[str, Callable[[], dict[str, int]]], ...] = (
        ("robots' frames", lambda: fuzz_sessions(half, options.seed)),
        ("control frames", lambda: fuzz_control(options.frames - half, options.seed)),
        ("connections", lambda: fuzz_connections(options.connections, options.seed)),
        ("packets", lambda: fuzz_packets(options.connections * PACKETS, options.seed)),
        ("pickles", lambda: fuzz_pickles(options.pickles, options.seed)),
    )
    for name, part in parts:
        began = time.monotonic()
        found[name] = part()
        print(f"{name}, {time.monotonic() - began:.1f} s: {found[name]}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"seed": options.seed, **found}, indent=1) + "\n")
    return 0


# ---- between ranks ----------------------------------------------------------------------------


def fuzz_control(frames: int, seed: int) -> dict[str, int]:
    """Mutated control frames, lengths included; a peer that breaks the contract is replaced.

    Raises:
        AssertionError: a peer hung, or raised anything but ProtocolError and PeerLostError.
    """
    rng = random.Random(seed)
    seeds = [
        encoder.encode(message)
        for message in (
            rank_messages.Heartbeat(3),
            rank_messages.Bell(7),
            rank_messages.PolicyFault(5, "exception", "text"),
            rank_messages.Measured((1, 2, 3)),
            rank_messages.Instruction(1, "go"),
            rank_messages.Goodbye(0, "drained"),
            rank_messages.Ready({"inputs": [1, 2]}),
        )
    ]
    counts: Counter[str] = Counter()
    sent = 0
    while sent < frames:
        ours, theirs = socket.socketpair()
        peer = Peer(ours, name="the fuzzed peer")
        theirs.settimeout(HANG_S)
        try:
            while sent < frames:
                sent += 1
                theirs.sendall(_framed(rng, seeds))
                peer.pump()
                counts["read"] += len(peer.inbox) + len(peer.bells)
                peer.inbox.clear()
                peer.bells.clear()
        except (ProtocolError, PeerLostError) as error:
            counts[type(error).__name__] += 1
        finally:
            peer.close()
            theirs.close()
    return {"sent": sent, **counts}


def _framed(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    if rng.random() < 0.01:
        return rng.randbytes(rng.randint(1, 64))
    is_hostile = rng.random() < HOSTILE_SHARE
    body = rng.choice(HOSTILE) if is_hostile else rng.choice(seeds)
    if rng.random() < 0.5:
        body = mutated(rng, body)
    return LENGTH.pack(len(body)) + body


# ---- connections ------------------------------------------------------------------------------


def fuzz_connections(connections: int, seed: int) -> dict[str, int]:
    """Broken greetings, wrong mechanisms, frames of 2 GiB, at an encrypted and a plain endpoint.

    Raises:
        AssertionError: afterwards the endpoint did not serve.
    """
    rng = random.Random(seed)
    public, secret = zmq.curve_keypair()
    counts: Counter[str] = Counter()
    for keys in (None, ServerKeys(secret, {public: "nobody"})):
        server = bind_server("tcp://127.0.0.1:*", keys)
        port = int(server.endpoint.rpartition(":")[2])
        for number in range(connections // 2):
            with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as raw:
                raw.sendall(_greeting(rng))
            counts["sent"] += 1
            if number % 100 == 99:
                counts["frames"] += len(server.drain())
        counts["frames"] += _drain_for(server, 0.5)
        counts.update(server.refused())
        if keys is None:
            client = connect_client(server.endpoint)
            deadline = time.monotonic() + HANG_S
            while not client.send(b"still there?") or not server.drain():
                assert time.monotonic() < deadline, "the endpoint does not serve any more"
            client.close()
        server.close()
    return dict(counts)


def _greeting(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 200))
    whole = handshake(rng.choice(MECHANISMS)) + (HUGE if kind == 1 else b"\0\5hello")
    return mutated(rng, whole) if kind == 2 else whole


def handshake(mechanism: bytes) -> bytes:
    """Returns what a peer that uses ``mechanism`` sends before its first frame."""
    return SIGNATURE + mechanism.ljust(20, b"\0") + b"\0" * 32 + READY


# ---- packets ----------------------------------------------------------------------------------


def fuzz_packets(packets: int, seed: int) -> dict[str, int]:
    """Packets with and without descriptors at a ``unix://`` endpoint, carriers that lie among them.

    Raises:
        AssertionError: a descriptor or a mapping stayed, or the endpoint did not serve.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        server = bind_server(f"unix://{folder}/robots")
        before = len(os.listdir("/proc/self/fd"))
        while counts["sent"] < packets:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.settimeout(HANG_S)
                raw.connect(f"{folder}/robots")
                closed = server.refused().get("closed", 0)
                for _ in range(min(100, packets - counts["sent"])):
                    counts["sent"] += 1
                    _send_packet(rng, raw)
                    counts["frames"] += _read(server)
                    if server.refused().get("closed", 0) > closed:
                        with suppress(OSError):  # as soon as it is hung up on
                            _send_packet(rng, raw)
                        break
            counts["frames"] += _read(server)
        client = connect_client(server.endpoint)
        deadline = time.monotonic() + HANG_S
        while not client.send(b"still there?") or not server.drain():
            assert time.monotonic() < deadline, "the endpoint does not serve any more"
        client.close()
        while server.drain() or server.has_more or len(os.listdir("/proc/self/fd")) > before:
            assert time.monotonic() < deadline, "descriptors stayed"
        counts["malformed"] = server.malformed
        counts.update(server.refused())
        server.close()
    return dict(counts)


def _read(server: MessageSocket) -> int:
    frames = server.drain()
    for frame in frames:
        with suppress(ProtocolError):
            len(frame.body)
    return len(frames)


def _send_packet(rng: random.Random, raw: socket.socket) -> None:
    size = rng.randrange(MEMORY_BYTES)
    body = rng.choice((HOSTILE[0], rng.randbytes(rng.randrange(5000)), _carrier(rng, size)))
    fds = [_memory(rng, size) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    try:
        socket.send_fds(raw, (body,), fds)
    finally:
        for fd in fds:
            os.close(fd)


def _carrier(rng: random.Random, size: int) -> bytes:
    found = rng.choice((size, size, size, size + 1, 0, 1 << 31, (1 << 64) - 1))
    at = rng.choice((0, 0, 0, 1, size, (1 << 64) - 1))
    length = rng.choice((CARRIER_BYTES, CARRIER_BYTES, CARRIER_BYTES, 8))
    return CARRIER.pack(MAGIC, at, found, rng.randrange(1 << 64)).ljust(length, b"\0")


def _memory(rng: random.Random, size: int) -> int:
    """A descriptor that may be sealed, short of pages, or no memory at all."""
    if rng.random() < 0.1:
        return os.open("/dev/zero", os.O_RDONLY)
    fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    os.write(fd, rng.randbytes(rng.choice((size, size, size, 0))))
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, rng.choice((SEALS, SEALS, SEALS & rng.randrange(16))))
    return fd


def _drain_for(server: MessageSocket, seconds: float) -> int:
    taken, until_ns = 0, now_ns() + round(seconds * NS_PER_S)
    while now_ns() < until_ns:
        taken += len(server.drain())
        time.sleep(10 * NS_PER_MS / NS_PER_S)
    return taken


if __name__ == "__main__":
    sys.exit(main())
