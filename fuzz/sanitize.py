"""Run the native code with random shapes under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

    make sanitize                      300 shapes per kernel, vector widths 4, 8 and 16

The C files are compiled again with the sanitizers, in a temporary cache. The sanitizer's library is loaded first, so
torch's memory has guard zones too. Results are compared with torch as in `targets.py`. Threads are plain ones
(`parallel.c`), because ThreadSanitizer cannot see the barriers of an OpenMP library.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
WIDTHS = (4, 8, 16)
SANITIZERS = {"address,undefined": "libasan.so", "thread": "libtsan.so"}
KERNELS = (
    "depthwise",
    "winograd",
    "conv-pool",
    "batch-norm",
    "resize",
    "rounding",
    "checksum",
    "half-partials",
    "jpeg",
    "jpeg-region",
)
THREADS = 3
COMPILE_SECONDS = 600.0


def run_shapes(sanitizer: str, width: int, shapes: int, kernels: Sequence[str]) -> None:
    """Run kernels on random shapes in this process, which has the sanitizer's library loaded."""
    from convolve.kernels import build

    flags = ("-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-DLANES={width}")
    build.OPTIONS = (*build.OPTIONS, *flags)
    build.TIME_LIMIT = COMPILE_SECONDS
    threads = build.load("parallel.c", ("-pthread",), HERE)
    assert isinstance(threads, build.Library), threads
    build.torch_threads = lambda: ctypes.cast(threads.handle.parallel, ctypes.c_void_p).value

    import torch

    import targets
    from native_targets import open_region_decoder

    # Torch itself uses one thread; its own barriers are invisible to ThreadSanitizer.
    torch.set_num_threads(1)
    torch.get_num_threads = lambda: THREADS
    if "jpeg-region" in kernels and isinstance(found := open_region_decoder(), build.Unavailable):
        print(f"jpeg-region: skipped; {found.reason}")
    for name in kernels:
        draw = random.Random(f"{name} {width}")
        for _ in range(shapes):
            targets.attempt(targets.TARGETS[name], draw.randbytes(draw.randint(1, 3000)))
    targets.remove_scratch()


def find_library(name: str) -> str:
    """Return the path of a library of the compiler."""
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def start(
    sanitizer: str, width: int, shapes: int, kernels: Sequence[str] = KERNELS
) -> subprocess.CompletedProcess[str]:
    """Run the shapes in a process with the sanitizer."""
    # The sanitizer looks for exceptions of C++ at its start.
    libraries = [find_library(name) for name in (SANITIZERS[sanitizer], "libstdc++.so")]
    with tempfile.TemporaryDirectory(prefix="convolve-sanitize-") as cache:
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's
            "TSAN_OPTIONS": "report_signal_unsafe=0 halt_on_error=1",
            "CONVOLVE_CACHE": cache,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--child", sanitizer, "--width", str(width), "--shapes", str(shapes)]
        command += ["--kernels", *kernels]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    """Run all combinations, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=int, default=300, help="random shapes of each kernel (default 300)")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="all by default")
    parser.add_argument("--child", choices=SANITIZERS, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_shapes(options.child, options.width, options.shapes, options.kernels)
        return 0
    failed = 0
    for sanitizer in SANITIZERS:
        for width in WIDTHS:
            done = start(sanitizer, width, options.shapes, options.kernels)
            failed += bool(done.returncode)
            print(f"{sanitizer:18} width {width:2}: {'failed' if done.returncode else 'ok'}", flush=True)
            print(done.stdout, end="")
            if done.returncode:
                print("\n".join(done.stderr.splitlines()[-60:]))
    return min(1, failed)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
    sys.exit(main())
