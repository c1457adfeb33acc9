"""Load on a loopback server: batching against one at a time, and twice the load that it can carry.

    python benchmarks/serve_load.py RUN [--seconds 6] [--clients 32]

Three servers are started in turn on the same run: one that batches, one with batches of one image, and one with a short
queue that gets more clients than it can carry. Printed: requests/s, latency p50 and p99, the ratio, and how fast 429
comes. Exits 1 when batching gives less than 3 times the requests/s, or when the overloaded server does not keep its
word: accepted requests within 3 times the p99 that the queue length promises, and 429 within half a second.

One image at a time is slow for networks with many layers, where each layer costs more to start than to compute; a
network of two layers spends its time in HTTP instead, and batching cannot help it three times. Use a deep one.
"""

import argparse
import asyncio
import io
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import numpy as np
from PIL import Image


@dataclass
class Seen:
    """What the clients saw."""

    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.accepted) / self.seconds

    def quantile(self, share: float, refused: bool = False) -> float:
        values = self.refused if refused else self.accepted
        return 1000 * float(np.quantile(values, share)) if values else float("nan")


def start(run: str, *words: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-u", "-m", "convolve", "serve", run, "--port", "0", "--reload", "none", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://\S+:(\d+)/", line):
            return process, int(found[1])
    raise SystemExit("the server did not start")


async def client(port: int, request: bytes, end: float, seen: Seen, pause: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        await reader.readexactly(int(length[1]))
        status, took = int(head[9:12]), time.perf_counter() - began
        if status == 200:
            seen.accepted.append(took)
        elif status == 429:
            seen.refused.append(took)
            await asyncio.sleep(pause)
        else:
            seen.other.append(status)
    writer.close()


async def load(port: int, body: bytes, clients: int, seconds: float) -> Seen:
    request = (
        b"POST /predict?top=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body
    seen, began = Seen(), time.perf_counter()
    await asyncio.gather(*(client(port, request, began + seconds, seen, 0.05) for _ in range(clients)))
    seen.seconds = time.perf_counter() - began
    return seen


def measure(run: str, body: bytes, clients: int, seconds: float, *words: str) -> Seen:
    process, port = start(run, *words)
    try:
        asyncio.run(load(port, body, 2, 1.0))
        return asyncio.run(load(port, body, clients, seconds))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def picture(size: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def show(name: str, seen: Seen) -> None:
    print(
        f"{name:<22} {seen.rate:8.1f} requests/s   p50 {seen.quantile(0.5):7.1f} ms   p99 {seen.quantile(0.99):7.1f} ms"
        f"   accepted {len(seen.accepted)}   429 {len(seen.refused)}   other {len(seen.other)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--threads", default="2")
    options = parser.parse_args()
    body = picture(32)
    threads = ("--threads", options.threads)
    batched = measure(options.run, body, options.clients, options.seconds, *threads)
    single = measure(options.run, body, options.clients, options.seconds, "--max-batch", "1", *threads)
    queue = options.clients
    crowd = measure(options.run, body, 3 * queue, options.seconds, "--queue", str(queue), *threads)
    show("batched", batched)
    show("one at a time", single)
    show(f"overload, queue {queue}", crowd)
    ratio = batched.rate / single.rate
    refusal = crowd.quantile(0.99, refused=True)
    promise = 1000 * (queue / crowd.rate)
    print(f"batching: {ratio:.2f} x one at a time")
    print(
        f"overload: 429 p99 {refusal:.1f} ms; accepted p99 {crowd.quantile(0.99):.1f} ms, "
        f"queue / throughput = {promise:.1f} ms"
    )
    good = ratio >= 3 and refusal < 500 and crowd.quantile(0.99) <= 3 * promise
    good = good and bool(crowd.refused) and not (batched.other or single.other or crowd.other)
    print("holds" if good else "DOES NOT HOLD")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
