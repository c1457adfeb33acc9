"""Load and abuse test of a server on the loopback interface.

    python benchmarks/serve_load.py RUN [--seconds 6] [--clients 32] [--threads 1]

    batching      closed loop: requests/s with dynamic batching, at least 3 times those of batches of one image
    overload      open loop at twice the measured capacity, with a short queue: the p99 latencies of rejected and of
                  accepted requests are below 0.5 s, and that of accepted ones in the second half is at most 1.5 times
                  that in the first
    abuse         1,000 idle sockets, slow bodies, endless forms, huge images and wrong types, together with good
                  clients: each kind gets its status, good clients get only 200 and a p99 less than 0.5 s above that
                  without abuse, and memory grows by less than 64 MB
    end           SIGTERM under load: every request gets a response, and the server exits with 0

Prints a table, then the checks that failed. Exits with 1 if any did.

Use a model with many layers, for which starting a layer costs more than computing it. A model of two layers spends its
time in HTTP, and batching cannot make it three times faster.
"""

import argparse
import asyncio
import io
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
from PIL import Image

from http_load import GONE, Responses, Server, closed_loop, milliseconds, open_loop, post, read_response, run_client

IDLE, GOOD_CLIENTS = 1000, 8
BODY_SECONDS, HEAD_SECONDS = 2.0, 10.0
LARGEST_GROWTH_MB = 64


class Served(Server):
    """A server process."""

    def __init__(self, run: str, *words: str) -> None:
        command = [sys.executable, "-u", "-m", "convolve", "serve", run, "--port", "0", "--reload", "none", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"http://\S+:(\d+)/", line):
                self.port = int(match[1])
                return
        raise SystemExit("the server did not start")

    def memory_mb(self) -> float:
        with open(f"/proc/{self.process.pid}/status") as file:
            return int(re.findall(r"VmRSS:\s+(\d+)", file.read())[0]) / 1024

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


async def abuse_once(served: Served, head: bytes, piece: bytes, pause: float, seen: Responses) -> None:
    """Send pieces until the server responds."""
    reader, writer = await served.connect()
    response = asyncio.create_task(read_response(reader))
    start = time.perf_counter()
    with suppress(OSError):
        writer.write(head)
        while not response.done():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
    try:
        seen.note((await response)[0], time.perf_counter() - start)
    except GONE:
        seen.lost += 1
    writer.close()


async def repeat(work, *arguments) -> None:  # type: ignore[no-untyped-def]
    while True:
        await work(*arguments)


async def idle_until_closed(served: Served, seen: Responses) -> None:
    reader, writer = await served.connect()
    with suppress(OSError):
        await reader.read(1)
    seen.lost += 1
    writer.close()


async def send_once(served: Served, request: bytes, seen: Responses) -> None:
    reader, writer = await served.connect()
    try:
        writer.write(request)
        seen.note((await read_response(reader))[0], 0.0)
    except GONE:
        seen.lost += 1
    writer.close()
    await asyncio.sleep(0.02)


async def under_abuse(served: Served, good: bytes, seconds: float) -> tuple[Responses, dict[str, Responses]]:
    """Run good clients and every kind of bad ones; return the responses of each."""
    kinds = {name: Responses() for name in ("slow", "endless", "huge", "wrong", "idle")}
    head = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {}\r\n{}\r\n\r\n"
    slow = head.format("image/png", "Content-Length: 100000").encode()
    form = head.format("multipart/form-data; boundary=x", "Transfer-Encoding: chunked").encode()
    chunk = b"10000\r\n" + b"-" * 65536 + b"\r\n"
    tasks = [asyncio.create_task(idle_until_closed(served, kinds["idle"])) for _ in range(IDLE)]
    tasks += [asyncio.create_task(repeat(abuse_once, served, slow, b"x", 0.1, kinds["slow"])) for _ in range(20)]
    tasks += [asyncio.create_task(repeat(abuse_once, served, form, chunk, 0.005, kinds["endless"])) for _ in range(2)]
    tasks.append(asyncio.create_task(repeat(send_once, served, post(huge_image()), kinds["huge"])))
    tasks.append(asyncio.create_task(repeat(send_once, served, post(b"x", "text/html"), kinds["wrong"])))
    await asyncio.sleep(0.5)
    seen = await closed_loop(served, [good], GOOD_CLIENTS, seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen, kinds


async def end_under_load(served: Served, request: bytes, clients: int) -> Responses:
    seen, active = Responses(), asyncio.Event()
    active.set()
    start = time.perf_counter()
    tasks = [asyncio.create_task(run_client(served, request, seen, active)) for _ in range(clients)]
    await asyncio.sleep(2)
    served.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    seen.seconds = time.perf_counter() - start
    return seen


def random_image(size: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return encode(Image.fromarray(pixels))


def huge_image() -> bytes:
    return encode(Image.new("1", (30_000, 30_000)))


def encode(image: Image.Image, image_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, image_format)
    return file.getvalue()


class Report:
    """The printed table, and the checks that failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        print(f"{'':<22}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'accepted':>10}{'429':>7}{'429 p99':>9}  other")

    def show(self, name: str, seen: Responses) -> None:
        p50, p99 = (milliseconds(seen.accepted, fraction) for fraction in (0.5, 0.99))
        late = f"{milliseconds(seen.rejected, 0.99):.1f}" if seen.rejected else "-"
        figures = f"{seen.rate:>11.1f}{p50:>9.1f}{p99:>9.1f}{len(seen.accepted):>10}{len(seen.rejected):>7}{late:>9}"
        lost = f", lost {seen.lost}" if seen.lost else ""
        print(f"{name:<22}{figures}  {seen.others or '-'}{lost}", flush=True)
        self.require(not seen.others and not seen.lost, f"{name}: only 200 and 429, and nothing lost")

    def require(self, passed: bool, check: str) -> None:
        if not passed:
            self.failed.append(check)


def measure_batching(options: argparse.Namespace, request: bytes, report: Report) -> Responses:
    """Measure both servers alternately, so load from other processes affects both alike."""
    found = {"batched": Responses(), "one at a time": Responses()}
    threads = ("--threads", options.threads)
    with Served(options.run, *threads) as many, Served(options.run, "--max-batch", "1", *threads) as single:
        for served in (many, single):
            asyncio.run(closed_loop(served, [request], 2, 0.5))
        for _ in range(3):
            for served, seen in zip((many, single), found.values(), strict=True):
                part = asyncio.run(closed_loop(served, [request], options.clients, options.seconds / 3))
                seen.accepted += part.accepted
                seen.statuses += part.statuses
                seen.seconds += part.seconds
                seen.lost += part.lost
    for name, seen in found.items():
        report.show(f"{name}, {options.clients}", seen)
    batched, single_seen = found.values()
    ratio = batched.rate / single_seen.rate
    print(f"    batching gives {ratio:.2f} times the requests/s")
    report.require(ratio >= 3, f"batching: {ratio:.2f} times one at a time, at least 3")
    return batched


def measure_overload(options: argparse.Namespace, request: bytes, capacity: float, report: Report) -> None:
    queue = options.clients
    with Served(options.run, "--queue", str(queue), "--threads", options.threads) as served:
        asyncio.run(closed_loop(served, [request], 2, 0.5))
        seen = asyncio.run(open_loop(served, [request], 2 * capacity, options.seconds))
    report.show(f"{2 * capacity:.0f}/s arrive, queue {queue}", seen)
    rejection, waited = milliseconds(seen.rejected, 0.99), milliseconds(seen.accepted, 0.99)
    middle = len(seen.accepted) // 2
    first, second = (milliseconds(half, 0.99) for half in (seen.accepted[:middle], seen.accepted[middle:]))
    print(f"    {seen.rate / capacity:.0%} of the capacity was used; p99 of the halves {first:.0f} and {second:.0f} ms")
    report.require(bool(seen.rejected) and rejection < 500, f"overload: 429 p99 {rejection:.0f} ms, at most 500")
    report.require(waited < 500, f"overload: accepted p99 {waited:.0f} ms, at most 500")
    report.require(second <= 1.5 * first, f"overload: p99 rose from {first:.0f} to {second:.0f} ms, at most by half")


def measure_abuse(options: argparse.Namespace, request: bytes, report: Report) -> None:
    words = ("--body-seconds", f"{BODY_SECONDS:g}", "--max-body-mb", "4", "--threads", options.threads)
    with Served(options.run, *words) as served:
        calm = asyncio.run(closed_loop(served, [request], GOOD_CLIENTS, options.seconds))
        asyncio.run(under_abuse(served, request, 1.0))  # the first time allocates buffers that are kept
        before = served.memory_mb()
        seen, kinds = asyncio.run(under_abuse(served, request, max(options.seconds, HEAD_SECONDS + 3)))
        growth = served.memory_mb() - before
        alive = served.process.poll() is None
    report.show(f"calm, {GOOD_CLIENTS}", calm)
    report.show(f"with abuse, {GOOD_CLIENTS}", seen)
    responses = ", ".join(f"{name} {dict(one.statuses) or f'{one.lost} closed'}" for name, one in kinds.items())
    print(f"    {responses}; memory {before:.0f} MB, {growth:+.1f} MB")
    for name, status in (("slow", 408), ("endless", 413), ("huge", 413), ("wrong", 415)):
        report.require(set(kinds[name].statuses) == {status}, f"abuse, {name}: only {status}")
    report.require(kinds["idle"].lost == IDLE, f"abuse: all {IDLE} idle connections are closed")
    report.require(alive and growth < LARGEST_GROWTH_MB, f"abuse: memory grew by {growth:.0f} MB")
    slower = milliseconds(seen.accepted, 0.99) - milliseconds(calm.accepted, 0.99)
    report.require(slower < 500, f"abuse: the p99 of good clients rose by {slower:.0f} ms, at most 500")


def measure_end(options: argparse.Namespace, request: bytes, report: Report) -> None:
    served = Served(options.run, "--threads", options.threads)
    seen = asyncio.run(end_under_load(served, request, options.clients))
    code = served.process.wait(60)
    report.show(f"SIGTERM, {options.clients}", seen)
    report.require(code == 0, f"SIGTERM: the server exited with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--threads", default="1")
    options = parser.parse_args()
    request, report = post(random_image(32)), Report()
    batched = measure_batching(options, request, report)
    measure_overload(options, request, batched.rate, report)
    measure_abuse(options, request, report)
    measure_end(options, request, report)
    print("\n".join(f"FAILED: {line}" for line in report.failed) or "all checks passed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
