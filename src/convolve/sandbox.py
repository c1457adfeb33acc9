"""A child process that can do no harm: no network, no file writes, no new processes.

Images, pickles and archives from others are parsed by libraries that have had holes and will have more. Such input is
handed to a `Sandbox`, which calls one function of convolve in a child. Bytes go in, bytes come out. The child locks
itself in before it sees the first byte; each layer holds without the others:

    Landlock   files can be read only below the interpreter, convolve and the folders given; no TCP, no signals outside
    seccomp    no sockets, no exec, no fork (threads are allowed), no file opened for writing, no kernel interfaces
    rlimits    memory, file size, open files, processes, no core dumps; these exist everywhere
    parent     a deadline for each call, a limit on the size of a result, an empty environment

The parent kills a child that misses its deadline or breaks the protocol, and starts a new one for the next call. No
pickle crosses the pipe: a call is a length and bytes, a result a status, a length and bytes.

If the kernel has no Landlock or seccomp, the other layers remain; `Confinement` says which are in force.
"""

import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from convolve import errors
from convolve.confinement import STATM, Confinement, Limits, filter_system_calls, limit_resources, restrict_files
from convolve.errors import ConvolveError, SandboxError
from convolve.interpreter import import_roots, module_command

_CALL = struct.Struct("<Q")
_RESULT = struct.Struct("<BQ")
_OK, _FAILED = 0, 1
_MAX_MESSAGE = 4096
START_SECONDS = 60.0
_KEPT_BYTES = 32 << 20
_PIPE_BYTES = 1 << 20
_FIRST_READ = 1 << 16
_DIED = "sandbox: the child died; the input may need too much memory"
_GARBAGE = "sandbox: the child reported garbage; it was stopped"
TIMED_OUT = "sandbox: time limit reached; the input takes too long to process"

Function = Callable[[bytes], bytes]


@dataclass
class Sandbox:
    """Calls one function (`package.module:name`, bytes to bytes) in a confined child. Use it from one thread at a time.

    `readable` are files and folders that the function may read; `descriptors` are open files that it inherits.
    """

    function: str
    limits: Limits = field(default_factory=Limits)
    readable: Sequence[Path] = ()
    descriptors: Sequence[int] = ()
    confinement: Confinement | None = None
    _child: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, payload: bytes, seconds: float | None = None) -> bytes:
        """Return the function's result; errors of convolve are raised again here.

        Args:
            seconds: time limit, if it is not that of `limits`.

        Raises:
            SandboxError: the child was killed, died, or raised something else.
        """
        child = self._child or self.start()
        try:
            return self._exchange(
                child, payload, time.monotonic() + (self.limits.seconds if seconds is None else seconds)
            )
        except SandboxError:
            self.close()
            raise

    def kill(self) -> None:
        """Kill the child, if one runs, from any thread; a call in another thread then raises SandboxError."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Kill the child, if one runs, and close its pipes; no call may be in progress in another thread."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()

    def start(self) -> "subprocess.Popen[bytes]":
        """Start a child and wait until it is confined. `call` does this when needed."""
        if sys.platform == "win32":
            raise SandboxError("sandbox: not available on Windows; use Linux, macOS or WSL")
        setup = {
            "function": self.function,
            "limits": asdict(self.limits),
            "readable": [str(path) for path in self.readable],
        }
        child = subprocess.Popen(
            module_command("convolve.sandbox"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(self.descriptors),
            env={
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.pathsep.join(import_roots()),
                "PATH": os.defpath,
                "LANG": "C.UTF-8",
                # glibc would return the memory of every image to the system, and get it back page by page.
                "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES),
                "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
            },
            cwd="/",
            bufsize=0,
        )
        for stream in (child.stdin, child.stdout):
            assert stream is not None, "both streams are pipes"
            os.set_blocking(stream.fileno(), False)
            _enlarge_pipe(stream.fileno())
        self._child = child
        try:
            ready = self._exchange(child, json.dumps(setup).encode(), time.monotonic() + START_SECONDS)
            self.confinement = Confinement(**json.loads(ready))
        except (SandboxError, ValueError, TypeError) as error:
            self.close()
            raise SandboxError(f"sandbox: cannot start ({error}); run `convolve doctor`") from error
        return child

    def begin(self, payload: bytes) -> "Call":
        """Start a call in the running child, for an event loop. If it fails, `close` the sandbox."""
        assert self._child is not None, "started"
        return Call(self._child, self.limits, payload)

    @property
    def running(self) -> bool:
        """True if there is a child, which may have died."""
        return self._child is not None

    def _exchange(self, child: "subprocess.Popen[bytes]", payload: bytes, deadline: float) -> bytes:
        call = Call(child, self.limits, payload)
        _require_time(deadline)
        while not call.send():
            _wait(call.input, selectors.EVENT_WRITE, deadline)
        while (result := call.receive()) is None:
            _wait(call.output, selectors.EVENT_READ, deadline)
        return result


class Call:
    """A call in progress. `send` and `receive` do what is possible without waiting.

    `input` and `output` are the descriptors to wait for: until all is sent, then until the result is there.
    """

    def __init__(self, child: "subprocess.Popen[bytes]", limits: Limits, payload: bytes) -> None:
        assert child.stdin is not None and child.stdout is not None, "both streams are pipes"
        self.input, self.output = child.stdin.fileno(), child.stdout.fileno()
        self._limits = limits
        self._unsent = memoryview(_CALL.pack(len(payload)) + payload)
        self._received = bytearray()
        self._status: int | None = None
        self._end = _FIRST_READ

    def send(self) -> bool:
        """Write what the pipe takes. Return True if that was the last of it."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.input, self._unsent) :]
        except BlockingIOError:
            return False
        except OSError as error:
            raise SandboxError(_DIED) from error
        return True

    def receive(self) -> bytes | None:
        """Read once. Return the result when it is complete; errors of convolve are raised again here."""
        try:
            part = os.read(self.output, min(self._end - len(self._received), _PIPE_BYTES))
        except BlockingIOError:
            return None
        if not part:
            raise SandboxError(_DIED)
        self._received += part
        if self._status is None and len(self._received) >= _RESULT.size:
            self._read_header()
        if self._status is None or len(self._received) < self._end:
            return None
        if len(self._received) > self._end:
            raise SandboxError(_GARBAGE)
        result = bytes(memoryview(self._received)[_RESULT.size :])
        if self._status == _OK:
            return result
        raise _rebuild_error(result)

    def _read_header(self) -> None:
        self._status, size = _RESULT.unpack_from(self._received)
        if size > (self._limits.result_bytes if self._status == _OK else _MAX_MESSAGE):
            raise SandboxError(f"sandbox: a result of {size} bytes is over the limit; use smaller input")
        self._end = _RESULT.size + size


def _enlarge_pipe(descriptor: int) -> None:
    """Let a pipe take a whole image, for which both sides would otherwise wait several times."""
    with suppress(ImportError, AttributeError, OSError):  # Linux has it
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _rebuild_error(message: bytes) -> ConvolveError:
    """Return the error that a child reported. Only classes of convolve.errors are rebuilt."""
    try:
        name, text = json.loads(message)
        kind = getattr(errors, str(name), SandboxError)
    except ValueError:
        return SandboxError(_GARBAGE)
    if isinstance(kind, type) and issubclass(kind, ConvolveError):
        return kind(str(text))
    return SandboxError(str(text))


def _wait(descriptor: int, event: int, deadline: float) -> None:
    _require_time(deadline)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, event)
        selector.select(max(0.0, deadline - time.monotonic()))


def _require_time(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise SandboxError(TIMED_OUT)


# The child. It starts single-threaded, since Landlock binds only the calling thread and those it starts later.


def main() -> None:
    """Serve calls on standard input until it closes."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library must not enter the protocol
    setup = json.loads(_receive(source) or b"{}")
    limits = Limits(**setup["limits"])
    landlock = restrict_files([*_code_roots(), *map(Path, setup["readable"])])
    module, _, name = str(setup["function"]).partition(":")
    function: Function = getattr(import_module(module), name)
    limit_resources(limits)
    confinement = Confinement(landlock, filter_system_calls())
    _send(sink, _OK, json.dumps(asdict(confinement)).encode())
    while (payload := _receive(source)) is not None:
        try:
            status, result = _OK, function(payload)
        except MemoryError:
            status, result = _FAILED, _describe(SandboxError("sandbox: memory limit reached; use smaller input"))
        except Exception as error:
            status, result = _FAILED, _describe(error)
        _send(sink, status, result)


def _describe(error: Exception) -> bytes:
    text = " ".join(str(error).split()) or type(error).__name__
    return json.dumps([type(error).__name__, text[: _MAX_MESSAGE // 8]]).encode()


def _receive(source: BinaryIO) -> bytes | None:
    header = source.read(_CALL.size)
    if len(header) < _CALL.size:
        return None
    (size,) = _CALL.unpack(header)
    return source.read(size)


def _send(sink: BinaryIO, status: int, result: bytes) -> None:
    sink.write(_RESULT.pack(status, len(result)) + result)
    sink.flush()


def _code_roots() -> list[Path]:
    """Return what the interpreter itself reads: its library, installed packages, shared libraries."""
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/dev/urandom", STATM]
    system += ["/proc/cpuinfo", "/sys/devices/system/cpu"]  # torch looks at the CPU
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    roots = dict.fromkeys([*prefixes, *(entry for entry in sys.path if os.path.isabs(entry)), *import_roots(), *system])
    return [Path(root) for root in roots if os.path.exists(root)]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    main()
