"""Start of `convolve serve model.onnx`: seconds from the start of the process to its first prediction.

    python benchmarks/serve_start.py [--rounds 3] [--models NAME...]

Once with an empty cache, so the engines are measured before one is chosen, then with the stored choice. The slowest
round counts. Limit: 3 seconds. The server must not have loaded torch. Exits with 1 if one of both is missed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import numpy as np
from PIL import Image

from infer_engines import open_target, write_files
from serve_load import encode
from serve_peers import MODELS, free_port
from turns import check_limit

LIMIT = 3.0
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.01


def start_once(model: Path, image: bytes, cache: Path) -> float:
    """Start a server and return the seconds to its first prediction."""
    port = free_port()
    command = [sys.executable, "-m", "convolve", "serve", str(model), "--port", str(port)]
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, "CONVOLVE_CACHE": str(cache)}
    ) as server:
        try:
            while not predict(port, image):
                if server.poll() is not None or time.perf_counter() - start > WAIT_SECONDS:
                    raise SystemExit(f"{model.name}: the server does not respond")
                time.sleep(POLL_SECONDS)
            took = time.perf_counter() - start
            if "libtorch" in Path(f"/proc/{server.pid}/maps").read_text():
                raise SystemExit(f"{model.name}: the server has loaded torch")
        finally:
            server.terminate()
    return took


def predict(port: int, image: bytes) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    try:
        connection.request("POST", "/predict", image, {"Content-Type": "image/png"})
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    passed = True
    for name in options.models:
        target = open_target(name, 1, MODELS[name][0])
        with tempfile.TemporaryDirectory() as folder:
            model = write_files(target, Path(folder), ("fp32",))["fp32"]
            image = encode(Image.fromarray(np.squeeze(target.pixels(1)[0])))
            seconds: dict[str, list[float]] = {"empty cache": [], "stored engine": []}
            for number in range(options.rounds):
                cache = Path(folder) / f"cache-{number}"
                for taken in seconds.values():
                    taken.append(start_once(model, image, cache))
        for kind, taken in seconds.items():
            shown = ", ".join(f"{value:.2f}" for value in taken)
            print(f"{name}, {kind}: {shown} s", flush=True)
            passed &= check_limit(f"First response of serve {name}.onnx, {kind}", max(taken), LIMIT, "s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
