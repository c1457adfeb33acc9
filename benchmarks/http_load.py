"""Clients on the loopback interface: closed and open loops of HTTP requests, and what they received."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GONE = (asyncio.IncompleteReadError, OSError)


class Server:
    """A server that listens on a port of this machine."""

    port: int

    async def connect(self) -> Connection:
        return await asyncio.open_connection("127.0.0.1", self.port)


@dataclass
class Responses:
    """Responses that the clients received, with latencies in seconds."""

    accepted: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    seconds: float = 0.0

    def note(self, status: int, took: float) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.accepted.append(took)
        elif status == 429:
            self.rejected.append(took)

    @property
    def rate(self) -> float:
        return len(self.accepted) / self.seconds

    @property
    def others(self) -> dict[int, int]:
        return {status: count for status, count in self.statuses.items() if status not in (200, 429)}


def milliseconds(values: list[float], fraction: float) -> float:
    return 1000 * float(np.quantile(values, fraction)) if values else float("nan")


def post(body: bytes, kind: str = "image/png", path: str = "/predict?top=1") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Return the status, and whether the connection stays open."""
    status, keep_alive, _ = await read_body(reader)
    return status, keep_alive


async def read_body(reader: asyncio.StreamReader) -> tuple[int, bool, bytes]:
    """Return the status, whether the connection stays open, and the body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert length is not None, head
    body = await reader.readexactly(int(length[1]))
    return int(head[9:12]), b"connection: close" not in head.lower(), body


async def run_client(server: Server, request: bytes, seen: Responses, active: asyncio.Event) -> None:
    """Run one client of a closed loop, which sends the next request after each response, until the server is gone."""
    connection: Connection | None = None
    while active.is_set():
        if connection is None:
            try:
                connection = await server.connect()
            except OSError:
                return
        start = time.perf_counter()
        try:
            connection[1].write(request)
            status, keep_alive = await read_response(connection[0])
        except GONE:
            seen.lost += 1
            return
        seen.note(status, time.perf_counter() - start)
        if not keep_alive:
            connection[1].close()
            connection = None
    if connection is not None:
        connection[1].close()


async def closed_loop(server: Server, requests: Sequence[bytes], clients: int, seconds: float) -> Responses:
    """Run clients that share the requests among them."""
    seen, active = Responses(), asyncio.Event()
    active.set()
    start = time.perf_counter()
    shared = [requests[number % len(requests)] for number in range(clients)]
    tasks = [asyncio.create_task(run_client(server, request, seen, active)) for request in shared]
    await asyncio.sleep(seconds)
    active.clear()
    await asyncio.gather(*tasks)
    seen.seconds = time.perf_counter() - start
    return seen


async def open_loop(server: Server, requests: Sequence[bytes], rate: float, seconds: float) -> Responses:
    """Send requests at a fixed rate. Latency counts from the time a request was due, so a late sender hides nothing."""
    seen, idle, start = Responses(), list[Connection](), time.perf_counter()

    async def one(request: bytes, due: float) -> None:
        try:
            connection = idle.pop() if idle else await server.connect()
            connection[1].write(request)
            status, keep_alive = await read_response(connection[0])
        except GONE:
            seen.lost += 1
            return
        seen.note(status, time.perf_counter() - due)
        idle.append(connection) if keep_alive else connection[1].close()

    tasks = []
    for number in range(int(rate * seconds)):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(requests[number % len(requests)], due)))
    seen.seconds = time.perf_counter() - start
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    return seen
