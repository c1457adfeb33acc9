"""Decode images in batches inside a sandbox: requests in one block of bytes, and model inputs in another.

Imports no torch, so the sandbox starts quickly.
"""

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
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
    common = _encode_spec(requests[0].spec, requests[0].max_pixels)
    header = f"{common}\n{json.dumps(images)}\n".encode()
    return b"".join((header, *(request.data for request in requests)))


@lru_cache
def _encode_spec(spec: InputSpec, max_pixels: int) -> str:
    return json.dumps({"spec": asdict(spec), "max_pixels": max_pixels})


@lru_cache
def _decode_spec(encoded: bytes) -> tuple[InputSpec, int]:
    values = json.loads(encoded)
    return InputSpec(**values["spec"]), values["max_pixels"]


def decode_inputs(payload: bytes) -> bytes:
    """Decode packed requests: a line with the status of each, and the pixels of those that succeed. Runs in a sandbox.

    Images that remain after `BATCH_SECONDS` are not decoded, so many slow ones do not miss the deadline together.
    """
    common_end = payload.index(b"\n")
    position, data = payload.index(b"\n", common_end + 1) + 1, memoryview(payload)
    spec, largest = _decode_spec(payload[:common_end])
    statuses: list[int | tuple[bool, str]] = []
    decoded: list[bytes] = []
    end = time.monotonic() + BATCH_SECONDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata, which does not affect the pixels
        for name, invert, length in json.loads(payload[common_end:position]):
            if statuses and time.monotonic() > end:
                statuses.append(_NOT_REACHED)
                continue
            encoded, position = data[position : position + length], position + length
            try:
                image = decode_image_in_thread(encoded, name, channels=spec.channels, largest=largest)
                decoded.append(preprocess(image, spec, invert).tobytes())
                statuses.append(_DECODED)
            except DataError as error:
                statuses.append((isinstance(error, ImageTooLargeError), str(error)[:_MAX_MESSAGE]))
    return b"".join((json.dumps(statuses).encode(), b"\n", *decoded))


def unpack_results(result: bytes, spec: InputSpec, count: int) -> list[Images | DataError | None]:
    """Return what `decode_inputs` found: the model input [H, W, C] of each image, its error, or None if not reached."""
    try:
        end = result.index(b"\n")
        statuses = json.loads(result[:end])
        shape = (statuses.count(_DECODED), spec.height, spec.width, spec.channels)
        decoded = iter(np.frombuffer(memoryview(result)[end + 1 :], np.uint8).reshape(shape))
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
