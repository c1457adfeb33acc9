"""MATLAB 5 files like the `meta.mat` of ImageNet's development kit."""

import struct
import zlib


def pack_meta(synsets, *, compressed=True):
    """Return a file with the struct `synsets`: WordNet ids by class number."""

    def element(kind, data):
        return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)

    def matrix(kind, count, body):
        sizes = struct.pack("<ii", count, 1)
        return element(14, element(6, struct.pack("<II", kind, 0)) + element(5, sizes) + element(1, b"") + body)

    fields = b"".join(name.ljust(32, b"\0") for name in (b"ILSVRC2012_ID", b"WNID"))
    cells = b"".join(
        matrix(6, 1, element(9, struct.pack("<d", number))) + matrix(4, len(name), element(4, name.encode("utf-16-le")))
        for number, name in synsets.items()
    )
    small = struct.pack("<HHi", 5, 4, 32)
    body = matrix(2, len(synsets), small + element(1, fields) + cells)
    packed = zlib.compress(body)
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
    return head + (struct.pack("<II", 15, len(packed)) + packed if compressed else body)
