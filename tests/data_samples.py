"""Small data sets and a mirror that can misbehave, for the tests of the package."""

import gzip
import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from convolve.data.catalog import MNIST, DatasetInfo, IdxFile
from convolve.data.readers.crc32c import crc32c_ranges
from convolve.data.readers.mnist import pack_idx


@dataclass
class Server:
    """Serves files on this machine, with faults on request."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    mode: str = "normal"
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)
    redirects: dict[str, str] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)

    def gets(self, name: str) -> list[str | None]:
        return [held for method, path, held in self.requests if method == "GET" and path == f"/{name}"]


class MirrorHandler(BaseHTTPRequestHandler):
    mirror: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def _answer(self, method: str) -> None:
        wanted = self.headers.get("Range")
        self.mirror.requests.append((method, self.path, wanted))
        name = self.path[1:]
        if name in self.mirror.redirects:
            self.send_response(302)
            self.send_header("Location", self.mirror.redirects[name])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = self.mirror.files.get(name)
        if body is None or (self.mirror.mode == "gone" and method == "GET"):
            self.send_error(404)
            return
        start = int(wanted[6:-1]) if wanted and self.mirror.mode != "no range" else 0
        if start and start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        for header, value in self.mirror.headers.get(name, {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if method == "GET":
            self._send(body[start:])

    def _send(self, body: bytes) -> None:
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if self.mirror.mode in ("stall", "slow"):
            self.mirror.let_go.wait(5 if self.mirror.mode == "stall" else 0.4)
        if self.mirror.mode not in ("stall", "cut"):
            self.wfile.write(body[half:])


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that were killed or timed out, which is part of the tests."""


@contextmanager
def running_server() -> Iterator[Server]:
    """Serve on this machine inside the block."""
    state = Server()
    http = QuietServer(("127.0.0.1", 0), type("BoundHandler", (MirrorHandler,), {"mirror": state}))
    state.url = f"http://127.0.0.1:{http.server_port}/"
    thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.let_go.set()
        http.shutdown()
        http.server_close()
        thread.join()


@dataclass(frozen=True)
class Sample:
    """Holds a small dataset in the format of MNIST."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

    def write_idx(self, folder: Path, *, ending: str = "") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for file, values in zip(MNIST.files, self.arrays, strict=True):
            contents = pack_idx(values)
            (folder / f"{file.name}{ending}").write_bytes(gzip.compress(contents) if ending == ".gz" else contents)
        return folder

    def entry(self, mirror: str) -> DatasetInfo:
        """Return a catalog entry for these contents with `mirror` as the only source."""
        contents = [pack_idx(values) for values in self.arrays]
        files = tuple(
            IdxFile(file.name, len(content), hashlib.sha256(content).hexdigest())
            for file, content in zip(MNIST.files, contents, strict=True)
        )
        return replace(MNIST, files=files, mirrors=(mirror,), wheel=None)

    def fill(self, server: Server) -> DatasetInfo:
        entry = self.entry(server.url)
        for file, values in zip(entry.files, self.arrays, strict=True):
            server.files[f"{file.name}.gz"] = gzip.compress(pack_idx(values))
        return entry


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of one range, as TFRecords are checked."""
    return int(crc32c_ranges(data, np.zeros(1, np.int64), np.array([len(data)], np.int64))[0])


def slow_crc(data: bytes) -> int:
    """Return the CRC-32C, computed bit by bit from its definition."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Return one TFRecord."""

    def masked(data: bytes) -> bytes:
        crc = slow_crc(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(payload))
    return length + masked(length) + payload + masked(payload)


def field_bytes(number: int, body: bytes) -> bytes:
    """Return a length-delimited protobuf field of less than 16384 bytes."""
    size = bytes([len(body)]) if len(body) < 128 else bytes([len(body) & 127 | 128, len(body) >> 7])
    return bytes([number << 3 | 2]) + size + body


def example(png: bytes, label: int, *, packed: bool = True) -> bytes:
    """Return a tf.train.Example with an image and a label."""
    numbers = field_bytes(1, bytes([label])) if packed else bytes([8, label])
    image = field_bytes(1, b"image") + field_bytes(2, field_bytes(1, field_bytes(1, png)))
    kind = field_bytes(1, b"label") + field_bytes(2, field_bytes(3, numbers))
    return field_bytes(1, field_bytes(1, image) + field_bytes(1, kind))
