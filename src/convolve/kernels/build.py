"""Small C files, compiled on first use with the system's compiler and kept in the cache.

They speak plain C through pointers: no torch header, no extension module. What files of a package share is in headers
beside them, which the compiler and the cache see in place of the lines that include them. Whatever is done in C has
another form, which does the work where there is no compiler, where it fails, or where `CONVOLVE_KERNEL=torch` asks for
that; with the same bits, but for the layers in `kernels`.
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
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from convolve import device
from convolve.files import atomic_file

COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
TIME_LIMIT = 120
_INCLUDE = re.compile(rb'^#include "([^"\n]+)".*$', re.MULTILINE)


@dataclass(frozen=True)
class Library:
    """A compiled C file."""

    path: Path
    loaded: ctypes.CDLL

    def function(self, name: str, arguments: Sequence[Any], result: Any = ctypes.c_int) -> Callable[..., int]:
        """One of its functions that return a whole number. The interpreter is free for other threads during a call."""
        found = getattr(self.loaded, name)
        found.argtypes, found.restype = arguments, result
        return found  # type: ignore[no-any-return]


@cache
def load(package: str, file: str, options: tuple[str, ...] = ()) -> Library | str:
    """A C file of a package, compiled for this CPU now if the cache does not have it; or why that cannot be."""
    if os.environ.get("CONVOLVE_KERNEL") == "torch":
        return "CONVOLVE_KERNEL=torch"
    if sys.platform == "win32":
        return "no native code on Windows"
    source = resources.files(package).joinpath(file).read_bytes()
    try:
        source = _inline_headers(source, file, package, set())
        path = device.cache_folder() / "native" / f"{Path(file).stem}-{_cache_key(source, options)}.so"
        _require_private(path.parent)
        if not path.exists():
            _compile(source, options, path)
        return Library(path, ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError, _BuildError) as error:
        # Also a library of another machine in a shared cache, or a damaged one.
        return " ".join(str(error).split())


@cache
def torch_threads() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded; None: one thread."""
    folder = Path(torch.__file__).parent
    candidates = [*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*")]
    for path in candidates:
        try:
            # Without RTLD_NOLOAD this could bring in a second pool; with it, only what torch uses is found.
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


class _BuildError(Exception):
    """Why there is no library."""


def _cache_key(source: bytes, options: tuple[str, ...]) -> str:
    """What a library depends on, as a name: its whole source, the CPU and the compiler's options."""
    facts = " ".join([device.cpu_name(), platform.machine(), *sorted(device.cpu_flags()), *OPTIONS, *options])
    return hashlib.sha256(source + facts.encode()).hexdigest()[:16]


def _inline_headers(source: bytes, file: str, package: str, seen: set[str]) -> bytes:
    """A source with the headers of its package where it includes them, each once.

    The compiler is told where every line comes from, so that it names a file and a line that exist.
    """

    def replace(include: re.Match[bytes]) -> bytes:
        name = include[1].decode()
        if name in seen:
            return b""
        seen.add(name)
        header = resources.files(package).joinpath(name)
        if not header.is_file():
            raise _BuildError(f"{file} includes {name}, which {package} does not have")
        text = _inline_headers(header.read_bytes(), name, package, seen)
        next_line = source.count(b"\n", 0, include.start()) + 2
        return f'#line 1 "{name}"\n'.encode() + text + f'\n#line {next_line} "{file}"'.encode()

    return _INCLUDE.sub(replace, source)


def _require_private(folder: Path) -> None:
    """What is loaded from here runs as the user, so nobody else may write here."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _BuildError(f"{folder}: others may write there")


def _compile(source: bytes, options: tuple[str, ...], path: Path) -> None:
    """Compile to a file that appears only when it is complete."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise _BuildError("no C compiler")
    with atomic_file(path) as draft:
        done = subprocess.run(
            [compiler, *OPTIONS, *options, "-x", "c", "-", "-o", str(draft)],
            input=source,
            capture_output=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        if done.returncode:
            raise _BuildError(f"{compiler} failed: {done.stderr.decode(errors='replace'):.200}")
