"""Looking at every picture of a data set: what is broken, odd, doubled or not what its name says."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from convolve.data.dataset import Dataset, Progress
from convolve.data.decode import Decoder
from convolve.data.gallery import Gallery, Source
from convolve.data.prepare import hash_file
from convolve.data.tars import read_metadata
from convolve.errors import DataError

SMALLEST = 16

_KINDS = {
    b"\xff\xd8\xff": ("JPEG", (".jpg", ".jpeg")),
    b"\x89PNG": ("PNG", (".png",)),
    b"GIF8": ("GIF", (".gif",)),
    b"BM": ("BMP", (".bmp",)),
    b"RIFF": ("WEBP", (".webp",)),
}
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True)
class Finding:
    """Something about one picture: `kind` is broken, misnamed, CMYK, tiny, duplicate or checksum."""

    kind: str
    name: str
    what: str


@dataclass(frozen=True)
class _Look:
    name: str
    digest: bytes
    findings: tuple[Finding, ...]


def inspect(dataset: Dataset, root: Path, workers: int, progress: Progress) -> list[Finding]:
    """Every finding, in the order of the samples; checksums of prepared files first."""
    findings = list(check_files(root, progress))
    first_seen: dict[bytes, str] = {}
    for what, samples in (("train", dataset.train), ("test", dataset.test)):
        assert isinstance(samples, Gallery), "pictures are in a gallery"
        source = samples.source
        with ThreadPoolExecutor(max(workers, 1), "check") as pool:
            looks = pool.map(lambda row, source=source: _look(source, row), range(len(source)))
            for row, look in enumerate(looks):
                findings += look.findings
                other = first_seen.setdefault(look.digest, look.name)
                if look.digest and other != look.name:
                    findings.append(Finding("duplicate", look.name, f"the same bytes as {other}"))
                if row % 100 == 0:
                    progress(f"check {what}", row, len(source))
    return findings


def check_files(root: Path, progress: Progress) -> Iterator[Finding]:
    """Prepared files whose contents are not those that were written."""
    checksums = read_metadata(root).get("checksums", {})
    if not isinstance(checksums, dict):
        return
    for number, (name, expected) in enumerate(checksums.items()):
        progress("checksums", number, len(checksums))
        path = root / Path(str(name)).name
        if not path.is_file():
            yield Finding("checksum", str(path), "is missing")
        elif hash_file(path) != expected:
            yield Finding("checksum", str(path), "has other contents than were written")


def _look(source: Source, row: int) -> _Look:
    name = source.name(row)
    pixels = torch.empty((SMALLEST, SMALLEST, 3), dtype=torch.uint8)
    size: list[tuple[int, int]] = []
    findings = []
    digest = b""

    def whole(full: tuple[int, int]) -> tuple[int, int, int, int]:
        size.append(full)
        # All of it at full scale: a box of 16 pixels in a corner would let damage further down go unseen.
        return 0, 0, min(full[0], SMALLEST), min(full[1], SMALLEST)

    try:
        data = source.read(row)
        digest = hashlib.sha256(data if isinstance(data, bytes) else np.ascontiguousarray(data).data).digest()
        Decoder(source, 0).decode(row, whole, pixels, flip=False)
        if min(size[0]) < SMALLEST:
            findings.append(Finding("tiny", name, f"{size[0][1]} x {size[0][0]} pixels"))
        if isinstance(data, bytes):
            findings += _look_at_bytes(name, data)
    except DataError as error:
        findings.append(Finding("broken", name, str(error).removeprefix(f"{name}: ")))
    return _Look(name, digest, tuple(findings))


def _look_at_bytes(name: str, data: bytes) -> Iterator[Finding]:
    kind, endings = next((known for magic, known in _KINDS.items() if data.startswith(magic)), ("", ()))
    ending = Path(name).suffix.lower()
    if kind and ending and ": sample" not in name and ending not in endings:
        yield Finding("misnamed", name, f"holds {kind}")
    if kind == "JPEG" and _count_components(data) == 4:
        yield Finding("CMYK", name, "four colour channels; it is converted at some cost")


def _count_components(jpeg: bytes) -> int:
    """The number of colour channels in a JPEG's frame header; 0 where none is found."""
    at = 2
    while at + 9 < len(jpeg) and jpeg[at] == 0xFF:
        if jpeg[at + 1] in _START_OF_FRAME:
            return jpeg[at + 9]
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return 0
