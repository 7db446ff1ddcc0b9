"""Mutated pickles at the reader that interprets them as opcodes.

A part of ``fuzz/frames.py``, which is the command. An audit hook of the interpreter watches each
read: nothing may be imported, called, opened or executed.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuzz.mutations import mutated

from ppstream.core.errors import ProtocolError
from ppstream.core.interpreter import GcControl
from ppstream.wire.lerobot import INSTRUCTIONS, OBSERVATION
from ppstream.wire.pickle_opcodes import decode

GOLDEN: Final = Path(__file__).resolve().parents[2] / "tests" / "golden"
CLASSES: Final = frozenset({OBSERVATION, INSTRUCTIONS})
HOSTILE_SHARE: Final = 0.02
CPU_LIMIT_S: Final = 1.0  # of one read
MEMORY_SPARE_BYTES: Final = 16 << 20
MEMORY_TIMES: Final = 8  # the pickle's own bytes
#: Events of the interpreter that a read never causes.
FORBIDDEN: Final = ("import", "exec", "compile", "open", "os.", "subprocess.", "socket.", "ctypes.")
#: Pickles that run a program, take the machine's memory, or never end, where they are unpickled.
HOSTILE: Final = (
    b"cos\nsystem\n(X\x04\0\0\0truetR.",
    b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94"
    b"\x85\x94R\x94.",
    b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    b"\x80\x02(cos\nsystem\nX\x04\0\0\0trueo.",
    b"\x80\x02]q\0h\0a.",  # a list of itself
    b"\x80\x02]" + b"q\0]h\0ah\0a" * 40 + b".",  # each list holds the one before twice
    b"\x80\x02\x8e" + b"\xff" * 7 + b"\x7f",  # bytes without end
    b"\x80\x02" + b"]" * 60_000 + b"a" * 59_999 + b".",
    b"\x80\x02X\x04\0\0\0texte" + b"q\0" + b"c_codecs\nencode\nh\0X\x06\0\0\0latin1\x86R" * 2000,
)
#: Bytes that begin an opcode, so that mutations say something.
OPCODES: Final = bytes.fromhex("80958c9394858687818a8b8e96") + b"NJKMGXCB]ae}su)t(qrhjcRb.0123oiP"

_seen: list[str] = []
_is_watching = False


def _watch(event: str, _arguments: object) -> None:
    if _is_watching and event.startswith(FORBIDDEN):
        _seen.append(event)


def fuzz_pickles(pickles: int, seed: int) -> dict[str, int]:
    """Mutated pickles of clients, and pickles that attack who unpickles them.

    Raises:
        AssertionError: one caused an event of the interpreter, or took too long or too much.
        Exception: anything but ProtocolError.
    """
    global _is_watching
    rng = random.Random(seed)
    seeds = [file.read_bytes() for file in sorted(GOLDEN.glob("lerobot-*.bin"))]
    assert seeds, f"no pickles of clients in {GOLDEN}"
    counts: Counter[str] = Counter()
    sys.addaudithook(_watch)
    counts.update(_read(one) for one in seeds)  # whatever loads lazily is loaded
    tracemalloc.start()
    try:
        with GcControl():  # a collection would walk what other tests left, on this thread's time
            for _ in range(pickles):
                body = _mutated(rng, seeds)
                _is_watching = True
                counts[_read(body)] += 1
                _is_watching = False
                assert not _seen, f"{_seen} by {body!r}"
    finally:
        _is_watching = False
        tracemalloc.stop()
    return {"sent": pickles, **counts}


def _read(body: bytes) -> str:
    tracemalloc.reset_peak()
    before, began_s = tracemalloc.get_traced_memory()[0], time.thread_time()
    try:
        decode(body, CLASSES)
        found = "read"
    except ProtocolError as error:
        found = "global" if "the global" in str(error) else "refused"
    took_s = time.thread_time() - began_s
    peak = tracemalloc.get_traced_memory()[1] - before
    assert took_s < CPU_LIMIT_S, f"{took_s:.1f} s for {body!r}"
    assert peak < MEMORY_SPARE_BYTES + MEMORY_TIMES * len(body), f"{peak} bytes for {body!r}"
    return found


def _mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    body = rng.choice(HOSTILE) if rng.random() < HOSTILE_SHARE else rng.choice(seeds)
    kind = rng.randrange(4)
    if kind == 0:
        return body
    if kind == 1:
        return mutated(rng, body)
    changed = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        if kind == 2:
            changed[at : at + rng.randint(0, 1)] = bytes([rng.choice(OPCODES)])
        else:  # a piece of another
            other = rng.choice(seeds)
            begin = rng.randrange(len(other))
            changed[at : at + rng.randrange(64)] = other[begin : begin + rng.randrange(64)]
    return bytes(changed)
