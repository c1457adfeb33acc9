"""Serving: convolve, and LitServe, BentoML, MLServer and plain starlette with onnxruntime, on the same ONNX file.

    python benchmarks/serve_peers.py [--rounds 5] [--seconds 5] [--clients 32] [--models NAME...]
                                     [--peers litserve bentoml mlserver starlette] [--envs FOLDER]

Every server gets the same images in base64 (32 x 32 PNGs; 224 x 224 JPEGs for efficientnet-lite0), in the JSON that
it documents, from clients on the loopback interface. The peers batch dynamically as documented (starlette has no
batching): up to 64 images, 2 ms of waiting where that is an option. convolve has its defaults, which do not wait.
Servers are pinned to one core, and the clients to another. One server runs at a time: the others are stopped (SIGSTOP).
A turn measures requests/s with many clients (closed loop), then the p99 latency at half of that rate (open loop). The
first round is not counted. Before, each server must return the probabilities of the model for all images.

Targets: 1.5 times the requests/s of the best peer, and a p99 that is not worse than its. Exits with 1 if one is missed.
A peer that cannot be installed or started is reported with the reason.
"""

import argparse
import asyncio
import base64
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from http_load import GONE, Server, closed_loop, milliseconds, open_loop, post, read_body
from infer_engines import open_target, write_files
from peers.onnx_classifier import Classifier
from serve_load import encode
from turns import HERE, PeerUnavailable, Rounds, Turn, check_ratio, compare, peer_python, process_tree, report_row

ONNX = ("onnxruntime", "pillow", "numpy")
PACKAGES = {
    "litserve": ("litserve", *ONNX),
    "bentoml": ("bentoml", *ONNX),
    "mlserver": ("mlserver", *ONNX),
    "starlette": ("starlette", "uvicorn[standard]", *ONNX),
}
# Data set and format of the images. Photos: gray images are taken for digits, which convolve centers first.
MODELS = {
    "lenet-bn": ("cifar10", "PNG"),
    "resnet20-cifar": ("cifar10", "PNG"),
    "efficientnet-lite0": ("imagenet", "JPEG"),
}
IMAGES = 16
TARGET = 1.5
FIGURES = {  # compared with every peer, and the target for the best one
    "rate": ("requests/s", TARGET),
    "per_cpu_second": ("requests per CPU second", None),
    "inverse_p99": ("1 / p99 at half the rate", 1.0),
}
TOLERANCE = 1e-4
START_SECONDS = 120.0
BUSY_CLIENT = 0.9


@dataclass(frozen=True)
class Protocol:
    """How a server is started and called: command, environment variables, JSON of a request and of its response."""

    command: Sequence[str]
    path: str
    build: Callable[[str], object]
    parse: Callable[[Any], float]
    variables: Mapping[str, str] = field(default_factory=dict)


def our_protocol(model: Path, port: int) -> Protocol:
    words = ("serve", str(model), "--port", str(port), "--reload", "none", "--threads", "1")
    command = [sys.executable, "-m", "convolve", *words]
    return Protocol(
        command,
        "/predict?top=1",
        lambda text: {"image": text},
        lambda body: float(body["predictions"][0]["probability"]),
    )


def peer_protocol(peer: str, python: Path, model: Path, port: int) -> Protocol:
    if peer == "bentoml":
        words = ("serve", "peers.bentoml_server:Service", "--host", "127.0.0.1", "--port", str(port))
        variables = {"MODEL": str(model), "BENTOML_DO_NOT_TRACK": "1"}
        command = [str(python), "-m", "bentoml", *words]
        return Protocol(command, "/predict", lambda text: {"images": [text]}, lambda body: float(body[0]), variables)
    if peer == "mlserver":
        command = [str(python.with_name("mlserver")), "start", str(write_mlserver_settings(model, port))]
        return Protocol(
            command, "/v2/models/model/infer", mlserver_request, lambda body: float(body["outputs"][0]["data"][0])
        )
    command = [str(python), str(HERE / "peers" / f"{peer}_server.py"), str(model), str(port)]
    return Protocol(command, "/predict", lambda text: {"image": text}, lambda body: float(body["probability"]))


def mlserver_request(text: str) -> object:
    entry = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text], "parameters": {"content_type": "str"}}
    return {"inputs": [entry]}


def write_mlserver_settings(model: Path, port: int) -> Path:
    """Write settings for a model in the process of the server, since a second process would share the core."""
    folder = model.with_name("mlserver")
    folder.mkdir(exist_ok=True)
    server = {"host": "127.0.0.1", "http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    server |= {"parallel_workers": 0, "debug": False}
    settings: dict[str, object] = {
        "name": "model",
        "implementation": "peers.mlserver_server.Runtime",
        "parameters": {"uri": str(model)},
    }
    settings |= {"max_batch_size": 64, "max_batch_time": 0.002}
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps(settings))
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ServerProcess(Server):
    """A server that can be paused, pinned to a core."""

    def __init__(self, name: str, protocol: Protocol, port: int, core: int) -> None:
        self.name, self.protocol, self.port = name, protocol, port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})  # which the process inherits
        try:
            self._process = subprocess.Popen(
                protocol.command,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", **protocol.variables},
            )
        finally:
            os.sched_setaffinity(0, ours)

    def request(self, image: str) -> bytes:
        return post(json.dumps(self.protocol.build(image)).encode(), "application/json", self.protocol.path)

    async def predict(self, image: str) -> float:
        """Return the probability that the server responds with."""
        reader, writer = await self.connect()
        writer.write(self.request(image))
        status, _, body = await read_body(reader)
        writer.close()
        if status != 200:
            raise PeerUnavailable(f"{self.name} responds with {status}: {body[:200]!r}")
        return self.protocol.parse(json.loads(body))

    def wait_until_ready(self, image: str) -> None:
        """Wait for the first prediction; a server may respond with an error until its model is loaded."""
        end = time.monotonic() + START_SECONDS
        problem: Exception | None = None
        while time.monotonic() < end and self._process.poll() is None:
            try:
                asyncio.run(self.predict(image))
                return
            except (*GONE, PeerUnavailable) as error:
                problem = error
                time.sleep(0.3)
        raise PeerUnavailable(f"{self.name} did not start ({problem}): {self.last_line()}")

    def last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "no output"

    def cpu_seconds(self) -> float:
        return sum(process_tree(self._process.pid).values())

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server and the processes that it has started."""
        for process in process_tree(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def close(self) -> None:
        """End the server, and what remains of its processes after ten seconds."""
        processes = process_tree(self._process.pid)
        self.send(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        self._log.close()


@contextmanager
def open_servers(options: argparse.Namespace, model: Path, image: str) -> Iterator[dict[str, ServerProcess]]:
    """Start convolve and the peers one after the other, each paused when it is ready."""
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for name in ("convolve", *options.peers):
            try:
                port = free_port()
                server = ServerProcess(name, open_protocol(name, options.envs, model, port), port, options.cores[0])
                stack.callback(server.close)
                server.wait_until_ready(image)
            except PeerUnavailable as error:
                if name == "convolve":
                    raise
                report_row("requests/s", name, [], note=str(error))
                continue
            server.send(signal.SIGSTOP)
            servers[name] = server
        yield servers


def open_protocol(name: str, environments: Path, model: Path, port: int) -> Protocol:
    if name == "convolve":
        return our_protocol(model, port)
    return peer_protocol(name, peer_python(name, PACKAGES[name], environments), model, port)


@contextmanager
def awake(server: ServerProcess) -> Iterator[None]:
    server.send(signal.SIGCONT)
    try:
        yield
    finally:
        server.send(signal.SIGSTOP)


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector of the clients, whose pauses of up to 0.1 s would count as latency of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_predictions(server: ServerProcess, images: Sequence[str], expected: Sequence[float]) -> None:
    with awake(server):
        for image, probability in zip(images, expected, strict=True):
            found = asyncio.run(server.predict(image))
            if abs(found - probability) > TOLERANCE:
                raise SystemExit(f"{server.name}: probability {found} instead of {probability}")


def measure(server: ServerProcess, images: Sequence[str], clients: int, seconds: float) -> Turn:
    """Measure the saturated rate, then latencies at half of it."""
    requests = [server.request(image) for image in images]
    with awake(server), uncollected():
        asyncio.run(closed_loop(server, requests, 4, min(0.5, seconds)))
        spent, used = time.process_time(), server.cpu_seconds()
        full = asyncio.run(closed_loop(server, requests, clients, seconds))
        spent, used = time.process_time() - spent, server.cpu_seconds() - used
        half = asyncio.run(open_loop(server, requests, full.rate / 2, seconds))
    for seen in (full, half):
        if seen.lost or set(seen.statuses) != {200}:
            raise PeerUnavailable(f"{seen.lost} requests lost, statuses {dict(seen.statuses)}")
    p99 = milliseconds(half.accepted, 0.99)
    client, per_cpu_second = spent / full.seconds, len(full.accepted) / max(used, 0.01)
    return {"rate": full.rate, "per_cpu_second": per_cpu_second, "p99": p99, "inverse_p99": 1 / p99, "client": client}


def take_rounds(servers: dict[str, ServerProcess], images: Sequence[str], options: argparse.Namespace) -> Rounds:
    """Measure all servers in turn. A peer that loses requests is reported with the reason and not measured again."""
    found: Rounds = {name: [] for name in servers}
    for number in range(options.rounds + 1):
        for name in list(found):
            try:
                turn = measure(servers[name], images, options.clients, options.seconds)
            except PeerUnavailable as error:
                if name == "convolve":
                    raise SystemExit(f"convolve: {error}") from error
                report_row("requests/s", name, [], note=str(error))
                del found[name]
                continue
            print_turn(number, name, turn)
            if number:
                found[name].append(turn)
    return found


def print_turn(number: int, name: str, turn: Turn) -> None:
    counted = f"round {number}" if number else "not counted"
    rates = f"{turn['rate']:>8,.0f} requests/s, {turn['per_cpu_second']:>8,.0f} per CPU second"
    limit = ", so the server may be faster" if turn["client"] > BUSY_CLIENT else ""
    busy = f"clients use {turn['client']:.0%} of their core{limit}"
    print(f"{counted:<12} {name:<10} {rates}, p99 at half {turn['p99']:.2f} ms; {busy}", flush=True)


def report(model: str, found: Rounds) -> bool:
    """Print the ratios to each peer, and return whether those to the best one reach their targets."""
    peers = {name: median(turn["rate"] for turn in turns) for name, turns in found.items() if name != "convolve"}
    if not peers:
        raise SystemExit(f"{model}: no peer could be started")
    best, passed = max(peers, key=peers.__getitem__), True
    for peer in peers:
        for figure, (name, target) in FIGURES.items():
            what, ratios = f"{model}: {name}", compare(found, "convolve", peer, figure)
            if peer == best and target is not None:
                passed &= check_ratio(what, peer, ratios, target)
            else:
                report_row(what, peer, ratios)
    return passed


def measure_model(name: str, options: argparse.Namespace, folder: Path) -> bool:
    dataset, image_format = MODELS[name]
    target = open_target(name, 1, dataset)
    model = write_files(target, folder, ("fp32",))["fp32"]
    pixels = target.pixels(IMAGES)
    images = [base64.b64encode(encode(Image.fromarray(np.squeeze(one)), image_format)).decode() for one in pixels]
    classifier = Classifier(str(model))
    expected = [classifier.run([classifier.decode(image)])[0] for image in images]
    with open_servers(options, model, images[0]) as servers:
        for server in servers.values():
            check_predictions(server, images, expected)
        return report(name, take_rounds(servers, images, options))


def main() -> int:
    from convolve.device import cache_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--peers", nargs="*", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--envs", type=Path, default=cache_folder() / "peers")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("serve_peers.py: one core; the servers and the clients need one each")
    options.cores = cores[:2]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so the servers are ended too
    os.sched_setaffinity(0, {cores[1]})
    passed = True
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            passed &= measure_model(model, options, Path(folder))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
