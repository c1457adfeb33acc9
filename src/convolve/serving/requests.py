"""Request bodies: reading them within limits of size and time, and the images inside.

A body is one image, a multipart form of images, or JSON with images in base64. File names from clients are never used
as paths, only as labels in responses, shortened and cleaned. URLs are never fetched. Every rejected request is a
`RequestError` with its HTTP status.
"""

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

from convolve.errors import ConvolveError
from convolve.serving.deadline import Deadline

_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'filename="([^"\r\n]{0,200})"', re.IGNORECASE)
_MAX_PART_HEADER = 4096
# ASCII digits only: "²".isdigit() is True, and int() rejects it. Few: int() takes long for thousands.
_POSITIVE = re.compile(r"0*[1-9][0-9]{0,8}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_QUOTES_PER_IMAGE = 4
_TRUE = frozenset({"1", "true", "yes", "on"})

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Limits of the server, in bytes, images, pixels, connections and seconds."""

    body_bytes: int = 16 * 1024 * 1024
    all_bodies_bytes: int = 256 * 1024 * 1024
    body_seconds: float = 10.0
    head_bytes: int = 64 * 1024
    head_seconds: float = 10.0
    request_seconds: float = 30.0
    images: int = 64
    pixels: int = 25_000_000
    connections: int = 4096


class RequestError(ConvolveError):
    """A request that is rejected with an HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class OverloadedError(RequestError):
    """A request that exceeds the capacity of the server at the moment."""

    def __init__(self, reason: str) -> None:
        super().__init__(429, reason)


@dataclass(frozen=True)
class UploadedImage:
    """One encoded image and its label in the response."""

    name: str
    data: bytes


@dataclass(frozen=True)
class PredictOptions:
    """Options of a prediction: number of classes (None: all), inversion, and the images to return."""

    top: int | None
    invert: bool | None
    input: bool
    explain: bool

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "PredictOptions":
        """Read the options from query parameters and JSON values."""
        top = str(values.get("top", "")) or None
        if top is not None and not _POSITIVE.fullmatch(top):
            raise RequestError(400, "top: must be a positive integer")
        invert = _is_true(values["invert"]) if "invert" in values else None
        return cls(int(top) if top else None, invert, _is_true(values.get("input")), _is_true(values.get("explain")))


def _is_true(value: object) -> bool:
    return value is not None and str(value).lower() in _TRUE


@lru_cache(maxsize=64)
def parse_query(query: bytes) -> Mapping[str, str]:
    """Return the parameters of a query string; the last of several counts."""
    return MappingProxyType(dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)))


def _fits(content_length: str, limit: int) -> bool:
    return bool(_LENGTH.fullmatch(content_length)) and int(content_length) <= limit


class BodyReader:
    """Reads request bodies within one memory budget for all of them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0

    async def read(
        self, task: "asyncio.Task[Any]", receive: Receive, content_length: str | None, arrived: bytes | None = None
    ) -> bytes:
        """Return a whole body, or raise as soon as a limit is exceeded. Call `release` when done with the body.

        Args:
            task: the current one.
            arrived: the body, if it arrived with the header and there is nothing to wait for.
        """
        limits = self._limits
        if content_length is not None and not _fits(content_length, limits.body_bytes):
            raise RequestError(413, f"Content-Length {content_length[:20]}: at most {limits.body_bytes} bytes allowed")
        if arrived is not None:
            self.held += len(arrived)
            try:
                self._check_size(len(arrived))
            except RequestError:
                self.release(arrived)
                raise
            return arrived
        body = bytearray()
        try:
            with Deadline(task, limits.body_seconds):
                await self._fill(body, receive)
        except asyncio.TimeoutError:
            self._discard(body)
            raise RequestError(408, f"body took longer than {limits.body_seconds:g} s") from None
        except BaseException:
            self._discard(body)
            raise
        return bytes(body)

    def _discard(self, body: bytearray) -> None:
        """Free the memory now: the traceback of the error would keep the body alive until the next collection."""
        self.held -= len(body)
        body.clear()

    async def _fill(self, body: bytearray, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "client disconnected")
            chunk, more = message.get("body", b""), message.get("more_body", False)
            body += chunk
            self.held += len(chunk)
            self._check_size(len(body))

    def _check_size(self, size: int) -> None:
        if size > self._limits.body_bytes:
            raise RequestError(413, f"body too large: at most {self._limits.body_bytes} bytes allowed")
        if self.held > self._limits.all_bodies_bytes:
            raise OverloadedError("too much data in transfer; try again later")

    def release(self, body: bytes) -> None:
        """Return the memory of a body to the budget."""
        self.held -= len(body)


def parse_uploads(body: bytes, content_type: str, limits: Limits) -> tuple[list[UploadedImage], dict[str, Any]]:
    """Return the images in a body and the options that a JSON body contains."""
    media_type = content_type.partition(";")[0].strip().lower()
    options: dict[str, Any] = {}
    if media_type == "application/json":
        uploads, options = _parse_json(body, limits)
    elif media_type == "multipart/form-data":
        uploads = _parse_multipart(body, content_type)
    elif media_type.startswith("image/") or media_type == "application/octet-stream":
        uploads = [UploadedImage("image", body)]
    else:
        raise RequestError(
            415, f"Content-Type {media_type[:60] or 'missing'}: send image/*, multipart/form-data or application/json"
        )
    if not uploads or not any(upload.data for upload in uploads):
        raise RequestError(400, "no image in the request")
    if len(uploads) > limits.images:
        raise RequestError(413, f"{len(uploads)} images: at most {limits.images} allowed per request")
    return uploads, options


def _parse_json(body: bytes, limits: Limits) -> tuple[list[UploadedImage], dict[str, Any]]:
    # Before parsing: millions of empty strings would hold the event loop for seconds. Base64 has no quotes.
    if body.count(b'"') > _QUOTES_PER_IMAGE * (limits.images + 16):
        raise RequestError(413, f"too many strings in JSON: at most {limits.images} images allowed per request")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "invalid JSON") from None
    if not isinstance(content, dict):
        raise RequestError(400, 'JSON must be an object such as {"images": ["<base64>"]}')
    images = content.get("images", [content["image"]] if "image" in content else None)
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise RequestError(400, 'JSON needs "image": "<base64>" or "images": ["<base64>", ...]')
    if len(images) > limits.images:
        raise RequestError(413, f"{len(images)} images: at most {limits.images} allowed per request")
    return [UploadedImage(f"image {number}", _decode_base64(text)) for number, text in enumerate(images, 1)], content


def _decode_base64(text: str) -> bytes:
    """Decode base64 with or without the prefix of a data URL. Anything else, such as a web URL, is an error."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    with suppress(binascii.Error, ValueError):
        return base64.b64decode(text, validate=True)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, "image is not valid base64 (URLs and paths are not fetched)") from None


def _parse_multipart(body: bytes, content_type: str) -> list[UploadedImage]:
    boundary = _BOUNDARY.search(content_type)
    if not boundary:
        raise RequestError(400, "multipart without a boundary")
    delimiter = b"--" + boundary[1].encode("latin-1", "replace")
    parts = (b"\r\n" + body).split(b"\r\n" + delimiter)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RequestError(400, "multipart without its closing boundary")
    uploads = []
    for part in parts[1:-1]:
        header, separator, data = part.lstrip(b"\r\n").partition(b"\r\n\r\n")
        if not separator or len(header) > _MAX_PART_HEADER:
            raise RequestError(
                400, f"multipart part without a header, or with more than {_MAX_PART_HEADER} bytes of it"
            )
        name = _NAME.search(header)
        if name is not None:
            uploads.append(UploadedImage(clean_name(name[1].decode("utf-8", "replace")), data))
    return uploads


def clean_name(name: str) -> str:
    """Turn a client's file name into a label: its last component, printable, at most 80 characters."""
    last = re.split(r"[\\/]", name)[-1]
    return "".join(letter for letter in last if letter.isprintable())[:80] or "image"
