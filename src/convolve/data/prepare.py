"""Convert images to a format that is fast to read: WebDataset shards, or a raw store of images of one size.

The output is a pure function of the input and the options, byte for byte, for any number of threads. An interrupted
conversion is resumed: shards are renamed when they are complete, and a raw store grows by whole chunks. The file
`metadata.json`, written last, has the sha256 of every file; until then `.prepare.json` describes the conversion.
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
from convolve.data.image_io import center_box
from convolve.data.loader.decoder import Decoder
from convolve.data.loader.decoding import EncodedImages
from convolve.data.readers.detect import SUPPORTED_LAYOUTS, open_images
from convolve.data.readers.raw_store import FORMAT as RAW_FORMAT
from convolve.data.readers.splits import SplitOptions
from convolve.data.readers.webdataset import METADATA
from convolve.download import Progress
from convolve.errors import ConfigError, DataError
from convolve.files import atomic_file, file_sha256, publish, recover, write_file

TAR_FORMAT = "webdataset"
STATE = ".prepare.json"
_CHUNK = 256
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class PrepareOptions:
    """Output format; `size` resizes to centered squares, `quality` is that of newly encoded JPEGs."""

    kind: Literal["webdataset", "raw"] = "webdataset"
    size: int | None = None
    quality: int = 95
    shard_samples: int = 1000


@dataclass(frozen=True)
class Prepared:
    """Result of a conversion."""

    place: str
    kind: str
    train_samples: int
    test_samples: int
    files: int
    stored_bytes: int


def prepare(
    dataset: Dataset[EncodedImages], target: Path, options: PrepareOptions, workers: int, progress: Progress
) -> Prepared:
    """Write a data set in another format; resume if an earlier call with the same options was interrupted."""
    if options.kind == "raw" and options.size is None:
        raise ConfigError("data prepare --format raw: images must have one size; give --image-size N")
    _start(target, options, dataset)
    with ThreadPoolExecutor(max(workers, 1), "prepare") as pool:
        write = _write_raw if options.kind == "raw" else _write_shards
        for split, reader in zip(_SPLITS, (dataset.train, dataset.test), strict=True):
            write(target, split, reader, options, pool, progress)
    return _finish(target, options, dataset, progress)


def _start(target: Path, options: PrepareOptions, dataset: Dataset[EncodedImages]) -> None:
    """Reserve the folder, or check that it contains the start of the same conversion."""
    readers = (dataset.train, dataset.test)
    about = {**asdict(options), "classes": list(dataset.classes), "counts": [len(reader) for reader in readers]}
    about["samples"] = [hashlib.sha256("\n".join(_names(reader)).encode()).hexdigest() for reader in readers]
    state = target / STATE
    try:
        target.mkdir(parents=True, exist_ok=True)
        if state.is_file():
            if json.loads(state.read_text(encoding="utf-8")) != about:
                raise ConfigError(f"{target}: contains an unfinished conversion; finish it or give an empty folder")
        elif any(target.iterdir()):
            raise ConfigError(f"{target}: not empty; give a new folder")
        else:
            with atomic_file(state) as draft:
                draft.write_text(json.dumps(about), encoding="utf-8")
        recover(target)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{target}: cannot write ({error}); give a new folder") from error


def _names(reader: EncodedImages) -> list[str]:
    return [f"{reader.name(row)}\0{label}" for row, label in enumerate(reader.labels.tolist())]


def _finish(target: Path, options: PrepareOptions, dataset: Dataset[EncodedImages], progress: Progress) -> Prepared:
    files = sorted(path for path in target.iterdir() if not path.name.startswith(".") and path.name != METADATA)
    checksums = {}
    for number, path in enumerate(files):
        progress("checksums", number, len(files))
        checksums[path.name] = file_sha256(path)
    metadata = {
        "format": RAW_FORMAT if options.kind == "raw" else TAR_FORMAT,
        "train_length": len(dataset.train),
        "validation_length": len(dataset.test),
        "image_size": options.size,
        "image_quality": options.quality if options.size and options.kind == "webdataset" else None,
        "classes": list(dataset.classes),
        "checksums": checksums,
    }
    write_file(target / METADATA, (json.dumps(metadata, indent=1) + "\n").encode())
    (target / STATE).unlink()
    stored = sum(path.stat().st_size for path in files)
    return Prepared(str(target), options.kind, len(dataset.train), len(dataset.test), len(files), stored)


def _crop_square(decoder: Decoder, row: int, size: int) -> Images:
    """Return the centered square of an image at the given size."""
    pixels = torch.empty((size, size, 3), dtype=torch.uint8)
    decoder.decode(row, lambda full: center_box(full, 1.0), pixels, flip=False)
    return pixels.numpy()


def _write_raw(
    target: Path,
    split: str,
    reader: EncodedImages,
    options: PrepareOptions,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    """Append chunks to a draft of the npy file, then rename it."""
    path, size = target / f"{split}-images.npy", options.size or 0
    np.save(target / f"{split}-labels.npy", reader.labels)
    if path.exists():
        return
    draft = target / f".{split}-images.part"
    header, row_bytes = _npy_header((len(reader), size, size, 3)), size * size * 3
    done = max(0, (draft.stat().st_size if draft.exists() else 0) - len(header)) // (row_bytes * _CHUNK) * _CHUNK
    decoder = Decoder(reader, 0)
    with draft.open("r+b" if draft.exists() else "w+b") as sink:
        sink.truncate(len(header) + done * row_bytes)
        sink.seek(0)
        sink.write(header)
        sink.seek(0, os.SEEK_END)
        for start in range(done, len(reader), _CHUNK):
            rows = range(start, min(start + _CHUNK, len(reader)))
            for pixels in pool.map(lambda row: _crop_square(decoder, row, size), rows):
                sink.write(pixels.tobytes())
            sink.flush()
            progress(f"prepare {split}", rows.stop, len(reader))
    publish(draft, path)


def _npy_header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _write_shards(
    target: Path,
    split: str,
    reader: EncodedImages,
    options: PrepareOptions,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    """Write one tar after the other; existing ones are complete and are kept."""
    make = _encoder(reader, options)
    for number, start in enumerate(range(0, len(reader), options.shard_samples)):
        path = target / f"{split}-{number:06d}.tar"
        rows = range(start, min(start + options.shard_samples, len(reader)))
        if not path.exists():
            with atomic_file(path) as draft, tarfile.open(draft, "w", format=tarfile.USTAR_FORMAT) as archive:
                for row, (ending, data) in zip(rows, pool.map(make, rows), strict=True):
                    for name, content in _members(reader, row, ending, data):
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
        progress(f"prepare {split}", rows.stop, len(reader))


def _members(reader: EncodedImages, row: int, ending: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    key = f"{row:09d}"
    yield f"{key}.{ending}", data
    yield f"{key}.cls", str(int(reader.labels[row])).encode()
    boxes: list[Any] = reader.objects(row).tolist()
    if boxes:
        yield f"{key}.json", json.dumps({"bbox": boxes}).encode()


def _encoder(reader: EncodedImages, options: PrepareOptions) -> Callable[[int], tuple[str, bytes]]:
    """Return a function that encodes one sample: the file as it is, or a JPEG of the requested size."""
    decoder, size = Decoder(reader, 0), options.size

    def encode(row: int) -> tuple[str, bytes]:
        data = reader.read(row)
        if size is None and isinstance(data, bytes):
            return ("jpg" if data[:3] == b"\xff\xd8\xff" else "png" if data[:4] == b"\x89PNG" else "webp"), data
        pixels = data if not isinstance(data, bytes) and size is None else _crop_square(decoder, row, size or 0)
        return "jpg", simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=options.quality)

    return encode


def prepare_images(
    source: Path, target: Path, options: PrepareOptions, workers: int | None, progress: Progress
) -> Prepared:
    """Write the images in a folder as WebDataset shards or as a raw store."""
    images = open_images(source, str(source), progress, SplitOptions(select=False))
    if images is None:
        raise DataError(f"{source}: contains no images; looked for {SUPPORTED_LAYOUTS}")
    if images.task != "single-label":
        raise DataError(
            f"{source}: its images have several labels, which prepared files cannot have; train on it as it is"
        )
    if target.resolve() == source.resolve():
        raise ConfigError(f"data prepare {source} {target}: source and target are the same folder; give a new target")
    threads = device.available_threads() if workers is None else workers
    return prepare(images, target, options, threads, progress)
