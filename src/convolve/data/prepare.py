"""Making picture data quick to read: WebDataset shards, or a raw store of pictures of one size.

The output is a pure function of the input and the options, byte for byte, whatever the number of threads. Work that was
interrupted goes on: shards are put in place whole, and a raw store grows by whole chunks. `metadata.json`, written
last, has the sha256 of every file; until then `.prepare.json` holds what the work is about.

The `data` verb: what is known and where it is, fetching it, checking it, making it quick to read.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch

from convolve import device
from convolve.data.dataset import Dataset, Images
from convolve.data.image_io import Decoder
from convolve.data.loader.decoding import EncodedImages, EncodedSource
from convolve.data.readers.detect import SUPPORTED_LAYOUTS, open_images
from convolve.data.readers.raw_store import FORMAT as RAW_FORMAT
from convolve.data.readers.webdataset import METADATA
from convolve.data.transforms.augment import center_box
from convolve.download import Progress
from convolve.errors import ConfigError, DataError
from convolve.files import atomic_file, file_sha256, publish, recover, write_file

TAR_FORMAT = "webdataset"
STATE = ".prepare.json"
_CHUNK = 256
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class PrepareOptions:
    """What to make; `size` resizes to centered squares, `quality` is that of JPEGs made anew."""

    kind: Literal["webdataset", "raw"] = "webdataset"
    size: int | None = None
    quality: int = 95
    shard_samples: int = 1000


@dataclass(frozen=True)
class Prepared:
    """What was made."""

    place: str
    kind: str
    train_samples: int
    test_samples: int
    files: int
    stored_bytes: int


def prepare(dataset: Dataset, target: Path, options: PrepareOptions, workers: int, progress: Progress) -> Prepared:
    """Write a data set of pictures in another form; goes on where an interrupted call with the same options stopped."""
    if not (isinstance(dataset.train, EncodedImages) and isinstance(dataset.test, EncodedImages)):
        raise ConfigError(f"{dataset.name}: lives in memory as it is; only pictures are prepared")
    if options.kind == "raw" and options.size is None:
        raise ConfigError("data prepare --format raw: pictures of one size are stored; give --image-size N")
    sources = (dataset.train.source, dataset.test.source)
    _start(target, options, dataset, sources)
    with ThreadPoolExecutor(max(workers, 1), "prepare") as pool:
        write = _write_raw if options.kind == "raw" else _write_shards
        for split, source in zip(_SPLITS, sources, strict=True):
            write(target, split, source, options, pool, progress)
    return _finish(target, options, dataset, sources, progress)


def _start(
    target: Path, options: PrepareOptions, dataset: Dataset, sources: tuple[EncodedSource, EncodedSource]
) -> None:
    """Claim the folder, or find that it holds the beginning of the same work."""
    about = {**asdict(options), "classes": list(dataset.classes), "counts": [len(source) for source in sources]}
    about["samples"] = [hashlib.sha256("\n".join(_names(source)).encode()).hexdigest() for source in sources]
    state = target / STATE
    try:
        target.mkdir(parents=True, exist_ok=True)
        if state.is_file():
            if json.loads(state.read_text(encoding="utf-8")) != about:
                raise ConfigError(f"{target}: holds the beginning of other work; finish that or give an empty folder")
        elif any(target.iterdir()):
            raise ConfigError(f"{target}: is not empty; give a new folder")
        else:
            with atomic_file(state) as draft:
                draft.write_text(json.dumps(about), encoding="utf-8")
        recover(target)
    except (OSError, ValueError) as error:
        raise DataError(f"{target}: cannot be used ({error}); give a new folder") from error


def _names(source: EncodedSource) -> list[str]:
    return [f"{source.name(row)}\0{label}" for row, label in enumerate(source.labels.tolist())]


def _finish(
    target: Path,
    options: PrepareOptions,
    dataset: Dataset,
    sources: tuple[EncodedSource, EncodedSource],
    progress: Progress,
) -> Prepared:
    files = sorted(path for path in target.iterdir() if not path.name.startswith(".") and path.name != METADATA)
    checksums = {}
    for number, path in enumerate(files):
        progress("checksums", number, len(files))
        checksums[path.name] = file_sha256(path)
    facts = {
        "format": RAW_FORMAT if options.kind == "raw" else TAR_FORMAT,
        "train_length": len(sources[0]),
        "validation_length": len(sources[1]),
        "image_size": options.size,
        "image_quality": options.quality if options.size and options.kind == "webdataset" else None,
        "classes": list(dataset.classes),
        "checksums": checksums,
    }
    write_file(target / METADATA, (json.dumps(facts, indent=1) + "\n").encode())
    (target / STATE).unlink()
    stored = sum(path.stat().st_size for path in files)
    return Prepared(str(target), options.kind, len(sources[0]), len(sources[1]), len(files), stored)


def _crop_square(decoder: Decoder, row: int, size: int) -> Images:
    """The centered square of a picture at the given size."""
    pixels = torch.empty((size, size, 3), dtype=torch.uint8)
    decoder.decode(row, lambda full: center_box(full, 1.0), pixels, flip=False)
    return pixels.numpy()


def _write_raw(
    target: Path,
    split: str,
    source: EncodedSource,
    options: PrepareOptions,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    """Grow a draft of the npy file chunk by chunk, then give it its name."""
    path, size = target / f"{split}-images.npy", options.size or 0
    np.save(target / f"{split}-labels.npy", source.labels)
    if path.exists():
        return
    draft = target / f".{split}-images.part"
    header, row_bytes = _npy_header((len(source), size, size, 3)), size * size * 3
    done = max(0, (draft.stat().st_size if draft.exists() else 0) - len(header)) // (row_bytes * _CHUNK) * _CHUNK
    decoder = Decoder(source, 0)
    with draft.open("r+b" if draft.exists() else "w+b") as sink:
        sink.truncate(len(header) + done * row_bytes)
        sink.seek(0)
        sink.write(header)
        sink.seek(0, os.SEEK_END)
        for start in range(done, len(source), _CHUNK):
            rows = range(start, min(start + _CHUNK, len(source)))
            for pixels in pool.map(lambda row: _crop_square(decoder, row, size), rows):
                sink.write(pixels.tobytes())
            sink.flush()
            progress(f"prepare {split}", rows.stop, len(source))
    publish(draft, path)


def _npy_header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _write_shards(
    target: Path,
    split: str,
    source: EncodedSource,
    options: PrepareOptions,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    """One tar after the other; those that are there are whole and are kept."""
    make = _encoder(source, options)
    for number, start in enumerate(range(0, len(source), options.shard_samples)):
        path = target / f"{split}-{number:06d}.tar"
        rows = range(start, min(start + options.shard_samples, len(source)))
        if not path.exists():
            with atomic_file(path) as draft, tarfile.open(draft, "w", format=tarfile.USTAR_FORMAT) as archive:
                for row, (ending, data) in zip(rows, pool.map(make, rows), strict=True):
                    for name, content in _members(source, row, ending, data):
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
        progress(f"prepare {split}", rows.stop, len(source))


def _members(source: EncodedSource, row: int, ending: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    key = f"{row:09d}"
    yield f"{key}.{ending}", data
    yield f"{key}.cls", str(int(source.labels[row])).encode()
    boxes: list[Any] = source.objects(row).tolist()
    if boxes:
        yield f"{key}.json", json.dumps({"bbox": boxes}).encode()


def _encoder(source: EncodedSource, options: PrepareOptions) -> Callable[[int], tuple[str, bytes]]:
    """Makes the bytes of one sample: the file as it is, or a JPEG of the wanted size."""
    decoder, size = Decoder(source, 0), options.size

    def encode(row: int) -> tuple[str, bytes]:
        data = source.read(row)
        if size is None and isinstance(data, bytes):
            return ("jpg" if data[:3] == b"\xff\xd8\xff" else "png" if data[:4] == b"\x89PNG" else "webp"), data
        pixels = data if not isinstance(data, bytes) and size is None else _crop_square(decoder, row, size or 0)
        return "jpg", simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=options.quality)

    return encode


def prepare_images(
    source: Path, target: Path, options: PrepareOptions, workers: int | None, progress: Progress
) -> Prepared:
    """Write the pictures in a folder as WebDataset shards or as a raw store."""
    pictures = open_images(source, str(source), progress)
    if pictures is None:
        raise DataError(f"{source}: no pictures in it; looked for {SUPPORTED_LAYOUTS}")
    if target.resolve() == source.resolve():
        raise ConfigError(f"data prepare {source} {target}: the same folder twice; give a new one to write to")
    threads = device.available_threads() if workers is None else workers
    return prepare(pictures, target, options, threads, progress)
