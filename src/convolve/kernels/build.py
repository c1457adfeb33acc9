"""Compile the C files of `csrc/` on first use with the system's compiler, and cache the libraries.

The functions take plain C types and pointers: no torch header, no extension module. Headers are inlined into the source
before it is compiled and hashed. A library's name contains the sha256 of its bytes, which is compared before it is
loaded, and no other user can write to the cache or replace it (`directory.private_folder`).

Everything done in C also exists in Python, which is used if no compiler is installed, if compilation fails, or with
`CONVOLVE_KERNEL=torch`. Except for the layers (`binding.OPTIONS`), both compute the same bits.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from convolve import device
from convolve.directory import find_intact, private_folder
from convolve.errors import ConvolveError
from convolve.files import file_sha256, publish

CSRC = Path(__file__).parent / "csrc"
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
TIME_LIMIT = 60.0  # seconds that a process spends on compiling all its files
_seconds_used = 0.0
_INCLUDE = re.compile(rb'^#include "([^"\n]+)".*$', re.MULTILINE)


@dataclass(frozen=True)
class Library:
    """A compiled C file."""

    path: Path
    handle: ctypes.CDLL

    def function(self, name: str, arguments: Sequence[Any], result: Any = ctypes.c_int) -> Callable[..., int]:
        """Return a function with an integer result. Calls release the GIL."""
        function = getattr(self.handle, name)
        function.argtypes, function.restype = arguments, result
        return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Unavailable:
    """The reason why a C file cannot be used, in one line."""

    reason: str


@cache
def load(file: str, options: tuple[str, ...] = (), folder: Path = CSRC) -> Library | Unavailable:
    """Load a C file, compiling it for this CPU unless the cache has it."""
    if os.environ.get("CONVOLVE_KERNEL") == "torch":
        return Unavailable("CONVOLVE_KERNEL=torch")
    if sys.platform == "win32":
        return Unavailable("no native code on Windows")
    try:
        source = _inline_headers(folder / file, set())
        name = f"{Path(file).stem}-{_cache_key(source, options)}"
        private = private_folder(device.cache_folder(), "native")
        path = find_intact(private, name, ".so") or _compile(source, options, private, name)
        return Library(path, ctypes.CDLL(str(path)))
    except (OSError, ConvolveError, _BuildError) as error:
        # An OSError may also mean a library of another machine in a shared cache.
        return Unavailable(" ".join(str(error).split()))


@cache
def torch_threads() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP library that torch has loaded; None means one thread."""
    folder = Path(torch.__file__).parent
    candidates = [*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*")]
    for path in candidates:
        try:
            # RTLD_NOLOAD finds only the library that torch uses; a second one would start a second thread pool.
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


class _BuildError(Exception):
    pass


def _cache_key(source: bytes, options: tuple[str, ...]) -> str:
    """Hash what a library depends on: its source with headers, the CPU and the compiler options."""
    target = " ".join([device.cpu_name(), platform.machine(), *sorted(device.cpu_flags()), *OPTIONS, *options])
    return hashlib.sha256(source + target.encode()).hexdigest()[:16]


def _inline_headers(path: Path, seen: set[str]) -> bytes:
    """Return a source with its headers inlined, each once; #line directives keep compiler messages right."""
    source = path.read_bytes()

    def replace(include: re.Match[bytes]) -> bytes:
        name = include[1].decode()
        if name in seen:
            return b""
        seen.add(name)
        header = path.with_name(name)
        if not header.is_file():
            raise _BuildError(f"{path.name} includes {name}, which does not exist")
        text = _inline_headers(header, seen)
        next_line = source.count(b"\n", 0, include.start()) + 2
        return f'#line 1 "{name}"\n'.encode() + text + f'\n#line {next_line} "{path.name}"'.encode()

    return _INCLUDE.sub(replace, source)


def _compile(source: bytes, options: tuple[str, ...], folder: Path, name: str) -> Path:
    """Compile in a private folder; the file appears under its final name only when it is complete."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _BuildError("no C compiler")
    with tempfile.TemporaryDirectory(prefix=f".tmp-{name}-", dir=folder, ignore_cleanup_errors=True) as temporary:
        draft = Path(temporary) / f"{name}.so"
        _run_compiler([str(Path(compiler).absolute()), *OPTIONS, *options, "-x", "c", "-", "-o", str(draft)], source)
        draft.chmod(0o700)
        path = folder / f"{name}-{file_sha256(draft)}.so"
        publish(draft, path)
    return path


def _run_compiler(command: list[str], source: bytes) -> None:
    """Run a compiler in a session that ends with it, within what is left of the time for all files of this process."""
    global _seconds_used
    folder, start = Path(command[-1]).parent, time.monotonic()
    if _seconds_used >= TIME_LIMIT:
        raise _BuildError(f"{command[0]}: no time left, {TIME_LIMIT} s for all files; check the compiler")
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(source, timeout=TIME_LIMIT - _seconds_used)
        except BaseException as error:
            # The compiler proper and the assembler are children of the command.
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise _BuildError(f"{command[0]}: not finished after {TIME_LIMIT} s; check the compiler") from None
            raise
        finally:
            _seconds_used += time.monotonic() - start
    if process.returncode:
        raise _BuildError(f"{command[0]} failed: {errors.decode(errors='replace'):.200}")
