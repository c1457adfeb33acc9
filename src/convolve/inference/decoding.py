"""Decode images in batches inside a sandbox: requests in one block of bytes, and model inputs in another.

Imports no torch, so the sandbox starts quickly.
"""

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from convolve.data.image_io import MAX_PIXELS, Images, decode_image_in_thread
from convolve.errors import DataError, ImageTooLargeError, SandboxError
from convolve.inference.preprocess import InputSpec, preprocess

BATCH_SECONDS = 0.25
_DECODED, _NOT_REACHED = 0, 1
_MAX_MESSAGE = 512


@dataclass(frozen=True)
class DecodeRequest:
    """An encoded image. `name` stands for it in error messages, `invert` is as in `preprocess`."""

    data: bytes
    name: str
    spec: InputSpec
    invert: bool | None = None
    max_pixels: int = MAX_PIXELS


def pack_requests(requests: Sequence[DecodeRequest]) -> bytes:
    """Return requests that have the same `spec` and `max_pixels` as one block of bytes."""
    images = [(request.name, request.invert, len(request.data)) for request in requests]
    header = {"spec": asdict(requests[0].spec), "max_pixels": requests[0].max_pixels, "images": images}
    return b"".join((json.dumps(header).encode(), b"\n", *(request.data for request in requests)))


def decode_inputs(payload: bytes) -> bytes:
    """Decode packed requests: a line with the status of each, and the pixels of those that succeed. Runs in a sandbox.

    Images that remain after `BATCH_SECONDS` are not decoded, so many slow ones do not miss the deadline together.
    """
    header, _, _ = payload.partition(b"\n")
    values = json.loads(header)
    spec, position, data = InputSpec(**values["spec"]), len(header) + 1, memoryview(payload)
    statuses: list[int | tuple[bool, str]] = []
    decoded: list[bytes] = []
    end = time.monotonic() + BATCH_SECONDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata, which does not affect the pixels
        for name, invert, length in values["images"]:
            if statuses and time.monotonic() > end:
                statuses.append(_NOT_REACHED)
                continue
            encoded, position = data[position : position + length], position + length
            try:
                image = decode_image_in_thread(encoded, name, channels=spec.channels, largest=values["max_pixels"])
                decoded.append(preprocess(image, spec, invert).tobytes())
                statuses.append(_DECODED)
            except DataError as error:
                statuses.append((isinstance(error, ImageTooLargeError), str(error)[:_MAX_MESSAGE]))
    return b"".join((json.dumps(statuses).encode(), b"\n", *decoded))


def unpack_results(result: bytes, spec: InputSpec, count: int) -> list[Images | DataError | None]:
    """Return what `decode_inputs` found: the model input [H, W, C] of each image, its error, or None if not reached."""
    try:
        header, _, pixels = result.partition(b"\n")
        statuses = json.loads(header)
        shape = (statuses.count(_DECODED), spec.height, spec.width, spec.channels)
        decoded = iter(np.frombuffer(pixels, np.uint8).reshape(shape))
        found = [_read_status(status, decoded) for status in statuses]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SandboxError("sandbox: the child reported garbage; it was stopped") from error
    if len(found) != count:
        raise SandboxError("sandbox: the child reported garbage; it was stopped")
    return found


def _read_status(status: Any, decoded: Iterator[Images]) -> Images | DataError | None:
    if status == _DECODED:
        return next(decoded)
    if status == _NOT_REACHED:
        return None
    too_large, message = status
    return ImageTooLargeError(str(message)) if too_large else DataError(str(message))
