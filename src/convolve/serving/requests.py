"""What clients send: bodies within limits of size and time, and the pictures in them.

A body is one picture, a multipart form of pictures, or JSON with pictures in base64. File names that clients send are
never used as paths: they are labels in answers, shortened and stripped. Addresses are never fetched.
"""

import asyncio
import base64
import binascii
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from convolve.errors import ConvolveError

_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'filename="([^"\r\n]{0,200})"', re.IGNORECASE)
_MAX_HEAD = 4096


@dataclass(frozen=True)
class Limits:
    """What the server takes: sizes in bytes, images and pixels, times in seconds."""

    body_bytes: int = 16 * 1024 * 1024
    all_bodies_bytes: int = 256 * 1024 * 1024
    body_seconds: float = 10.0
    head_seconds: float = 10.0
    request_seconds: float = 30.0
    images: int = 64
    pixels: int = 25_000_000
    connections: int = 4096


class RequestError(ConvolveError):
    """A request that gets an answer other than 200; `status` is its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class UploadedImage:
    """One picture as it came, and what to call it in the answer."""

    name: str
    data: bytes


class BodyReader:
    """Reads bodies; all that are under way together stay within one budget."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0

    async def read(self, chunks: AsyncIterator[bytes], announced: str | None) -> bytes:
        """A whole body, or a refusal as soon as a limit is passed. `release` gives its room back."""
        limits = self._limits
        if announced is not None and (not announced.isdigit() or int(announced) > limits.body_bytes):
            raise RequestError(413, f"a body of {announced[:20]} bytes: at most {limits.body_bytes} are accepted")
        body = bytearray()
        try:
            await asyncio.wait_for(self._fill(body, chunks), limits.body_seconds)
        except asyncio.TimeoutError:
            self._drop(body)
            raise RequestError(408, f"the body took longer than {limits.body_seconds:g} s") from None
        except BaseException:
            self._drop(body)
            raise
        return bytes(body)

    def _drop(self, body: bytearray) -> None:
        """Give memory back at once: the refusal's traceback would keep the body alive until the next collection."""
        self.held -= len(body)
        body.clear()

    async def _fill(self, body: bytearray, chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            body += chunk
            self.held += len(chunk)
            if len(body) > self._limits.body_bytes:
                raise RequestError(413, f"a body of more than {self._limits.body_bytes} bytes is not accepted")
            if self.held > self._limits.all_bodies_bytes:
                raise RequestError(429, "too much data is being sent at once; try again later")

    def release(self, body: bytes) -> None:
        """The body is no longer needed."""
        self.held -= len(body)


def find_uploads(body: bytes, content_type: str, limits: Limits) -> tuple[list[UploadedImage], dict[str, Any]]:
    """The pictures in a body, and the options that a JSON body carries."""
    kind = content_type.partition(";")[0].strip().lower()
    options: dict[str, Any] = {}
    if kind == "application/json":
        uploads, options = _from_json(body)
    elif kind == "multipart/form-data":
        uploads = _from_multipart(body, content_type)
    elif kind.startswith("image/") or kind == "application/octet-stream":
        uploads = [UploadedImage("picture", body)]
    else:
        raise RequestError(415, f"content type {kind[:60] or 'missing'}: send image/*, multipart/form-data or JSON")
    if not uploads or not any(one.data for one in uploads):
        raise RequestError(400, "there is no picture in the request")
    if len(uploads) > limits.images:
        raise RequestError(413, f"{len(uploads)} pictures: at most {limits.images} in one request")
    return uploads, options


def _from_json(body: bytes) -> tuple[list[UploadedImage], dict[str, Any]]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise RequestError(400, 'JSON must be an object such as {"images": ["<base64>"]}')
    images = given.get("images", [given["image"]] if "image" in given else None)
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise RequestError(400, 'JSON needs "image": "<base64>" or "images": ["<base64>", ...]')
    return [UploadedImage(f"picture {number}", _decode(text)) for number, text in enumerate(images, 1)], given


def _decode(text: str) -> bytes:
    """Base64 with or without the head of a data address; anything else, such as a web address, is refused."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, "a picture is not base64 (addresses and paths are not fetched)") from None


def _from_multipart(body: bytes, content_type: str) -> list[UploadedImage]:
    found = _BOUNDARY.search(content_type)
    if not found:
        raise RequestError(400, "multipart without a boundary")
    mark = b"--" + found[1].encode("latin-1", "replace")
    parts = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RequestError(400, "multipart without its closing boundary")
    uploads = []
    for part in parts[1:-1]:
        head, gap, data = part.lstrip(b"\r\n").partition(b"\r\n\r\n")
        if not gap or len(head) > _MAX_HEAD:
            raise RequestError(400, "a part of the form has no head, or too long a one")
        name = _NAME.search(head)
        if name is not None:
            uploads.append(UploadedImage(clean_name(name[1].decode("utf-8", "replace")), data))
    return uploads


def clean_name(name: str) -> str:
    """A client's file name as a label: the last part of it, printable, short."""
    last = re.split(r"[\\/]", name)[-1]
    return "".join(letter for letter in last if letter.isprintable())[:80] or "picture"
