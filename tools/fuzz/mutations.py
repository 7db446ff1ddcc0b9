"""Ammunition of the fuzzers: mutated frames, and frames that once broke a decoder of this kind."""

from __future__ import annotations

import random
from typing import Final

#: Frames that once broke, or could break, a decoder of this kind.
HOSTILE: Final = (
    b"",
    b"\x98\xa6\xa6\xa6\xa6\xa6\xa6\xa6",  # a tag that is text, and not UTF-8
    b"\xdd\x7f\xff\xff\xff\x06",  # an array of two thousand million
    b"\x95\x02\x07\x00\xc6\xff\xff\xff\xff",  # 4 GiB of stamps
    b"\x91" * 100_000,  # a deep nest
    b"\xc1",
    b"\x92\x06\xcf" + b"\xff" * 8,  # a number beyond int64
)


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """``frame`` with up to three bytes or runs of bytes inserted, taken away or changed."""
    body = bytearray(frame)
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(body) + 1)
        kind = rng.randrange(3)
        if kind == 0:
            body[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 1:
            del body[at : at + rng.randint(1, 8)]
        elif at < len(body):
            body[at] = rng.randrange(256)
    return bytes(body)
