"""Mutate bytes at random without coverage feedback, so a given seed always gives the same inputs."""

import random

EDGES = [
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\0" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\x80" + b"\0" * 7,
]
EDGES += [
    b"NaN",
    b"1e999",
    b"-1",
    b"9" * 30,
    b"[" * 50,
    b"{",
    b'"',
    b"\n",
    b"\r\n",
    b"null",
    b"\xed\xa0\x80",
    b"%s",
    b"../",
]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Return the data after one to four edits."""
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(data) + 1), draw.randint(1, 16)
        before, piece, after = data[:at], data[at : at + length], data[at + length :]
        data = draw.choice(
            [
                before + after,
                before + piece * draw.randint(2, 9) + after,
                before + draw.choice(EDGES) + piece + after,
                before + draw.choice(EDGES) + after,
                before + bytes(byte ^ 1 << draw.randrange(8) for byte in piece) + after,
                before + draw.randbytes(length) + after,
                before,
            ]
        )
    return data
