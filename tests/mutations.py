"""Files as somebody might change them who wishes us ill, or a disk does."""

import random

TOKENS = (
    *(b"Infinity", b"NaN", b"1e999", b"-1", b"9" * 400, b"1000000", b"4294967296", b"1e9", b"0", b"null", b"true"),
    *(b"[" * 200, b'{"a":' * 200, rb"\ud800", b"\x00", b"\xff" * 8, b'"', b"'", b"[]", b"{}", b"\n", b": ", b"- "),
    *(b"../../x", b"/etc/passwd", b"s3://a/b", b"{0..999999999}", b"&a [*a]", b"!!python/name:os.system", b'""'),
    *(b"__module__: os", b"__function__: system", b'"__class__": "x"', b"part_filter: evil.py:keep", b"path: x"),
    *(b"F8_E4M3", b"U16", b"BOOL", b"F64", b"C64", b"latent", b"train", b"config.json"),
)
"""What readers stumble over."""


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content after one to four changes: a bit, a cut, a stretch twice, its end, or one of `TOKENS`."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(changed) + 1)
        end = min(len(changed), start + draw.choice([1, 2, 8, 50]))
        match draw.randrange(8):
            case 0 if start < len(changed):
                changed[start] ^= 1 << draw.randrange(8)
            case 1:
                del changed[start:end]
            case 2:
                changed[start:start] = changed[start:end]
            case 3 if draw.random() < 0.2:
                del changed[start:]
            case _:
                changed[start:end] = draw.choice(TOKENS)
    return bytes(changed)
