"""Compile the C files of `csrc/` on first use with the system's compiler, and cache the libraries.

The functions take plain C types and pointers: no torch header, no extension module. Headers are inlined into the source
before it is compiled and hashed. Everything done in C also exists in Python, which is used if no compiler is installed,
if compilation fails, or with `CONVOLVE_KERNEL=torch`. Except for the layers (`binding.OPTIONS`), both compute the same
bits.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from convolve import device
from convolve.files import atomic_file

CSRC = Path(__file__).parent / "csrc"
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
TIME_LIMIT = 120
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
        path = device.cache_folder() / "native" / f"{Path(file).stem}-{_cache_key(source, options)}.so"
        _require_private(path.parent)
        if not path.exists():
            _compile(source, options, path)
        return Library(path, ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError, _BuildError) as error:
        # An OSError may also mean a damaged library, or one of another machine in a shared cache.
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


def _require_private(folder: Path) -> None:
    """Reject a folder that other users can write to: libraries loaded from it run as this user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _BuildError(f"{folder}: others may write there")


def _compile(source: bytes, options: tuple[str, ...], path: Path) -> None:
    """Compile to a file that appears only when it is complete."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _BuildError("no C compiler")
    with atomic_file(path) as draft:
        result = subprocess.run(
            [compiler, *OPTIONS, *options, "-x", "c", "-", "-o", str(draft)],
            input=source,
            capture_output=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        if result.returncode:
            raise _BuildError(f"{compiler} failed: {result.stderr.decode(errors='replace'):.200}")
