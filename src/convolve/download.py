"""Downloads over HTTP (fastest mirror first, timeouts, resume, size limit) and with pip; the progress callback.

Nothing here is trusted: the caller compares the sha256 of what was received before it uses it.
"""

import http.client
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Progress(Protocol):
    """Callback for the progress of a long task."""

    def __call__(self, task: str, done: int, total: int | None, /) -> None:
        """Report that `done` of `total` units are finished; `total` is None if it is unknown."""


def ignore_progress(task: str, done: int, total: int | None) -> None:
    """Do nothing; pass this function to disable progress reports."""


_CHUNK_BYTES = 1 << 18
_GRACE_SECONDS = 0.5
_HEAD_NOT_ALLOWED = (405, 501)
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds: for the first response of any mirror, and for the next bytes of a transfer."""

    connect: float = 5.0
    read: float = 10.0


DEFAULT_TIMEOUTS = Timeouts()


class MirrorError(Exception):
    """One mirror could not deliver one file."""


def find_mirrors(mirrors: Sequence[str], name: str, timeout: float) -> tuple[list[str], list[str]]:
    """Return the mirrors that respond, fastest first, and an error for each of the others.

    All mirrors are probed in parallel, so without a network this takes `timeout` seconds even if name resolution hangs.
    """
    responses: queue.Queue[tuple[str, str | None]] = queue.Queue()
    for mirror in mirrors:
        threading.Thread(target=_probe, args=(mirror, name, timeout, responses), daemon=True).start()
    good, errors, silent = [], [], list(mirrors)
    deadline = time.monotonic() + timeout
    while silent:
        try:
            mirror, problem = responses.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            break
        silent.remove(mirror)
        if problem is None:
            good.append(mirror)
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        else:
            errors.append(f"{host_of(mirror)}: {problem}")
    return good, errors + [f"{host_of(mirror)}: no response within {timeout:g} s" for mirror in silent]


def _probe(mirror: str, name: str, timeout: float, responses: "queue.Queue[tuple[str, str | None]]") -> None:
    try:
        with _open(mirror + name, {}, timeout, "HEAD"):
            responses.put((mirror, None))
    except urllib.error.HTTPError as error:
        error.close()
        responses.put((mirror, None if error.code in _HEAD_NOT_ALLOWED else f"HTTP {error.code}"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        responses.put((mirror, _explain(error)))


def _open(url: str, headers: dict[str, str], timeout: float, method: str) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "convolve", **headers}, method=method)
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    return response


def host_of(mirror: str) -> str:
    """Return the host name of a mirror URL."""
    return urllib.parse.urlsplit(mirror).hostname or mirror


def _explain(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(str(text).split())


def transfer(url: str, part: Path, max_bytes: int, progress: Progress, timeout: float) -> None:
    """Download a file to `part`, resuming after the bytes that it has; they are kept if the transfer fails."""
    received = part.stat().st_size if part.exists() else 0
    response = _request(url, received, timeout)
    if response is None:
        return
    with response:
        if not _continues(response, received):
            received = 0
        length = response.headers.get("Content-Length", "")
        total = received + int(length) if length.isdecimal() else None
        if (total or 0) > max_bytes:
            raise MirrorError(f"announces {total} bytes, at most {max_bytes} are expected")
        with part.open("ab" if received else "wb") as sink:
            while chunk := _receive(response):
                received += len(chunk)
                if received > max_bytes:
                    raise MirrorError(f"sends more than the expected {max_bytes} bytes")
                sink.write(chunk)
                progress(f"fetch {url.rpartition('/')[2]}", received, total)
        if total is not None and received < total:
            raise MirrorError(f"connection lost after {received} of {total} bytes")


def _request(url: str, received: int, timeout: float) -> http.client.HTTPResponse | None:
    """Request the bytes after the first `received`; return None if there are no more."""
    try:
        return _open(url, {"Range": f"bytes={received}-"} if received else {}, timeout, "GET")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _RANGE_NOT_SATISFIABLE and received:
            return None
        raise MirrorError(f"HTTP {error.code} for {url.rpartition('/')[2]}") from error
    except (OSError, http.client.HTTPException) as error:
        raise MirrorError(_explain(error)) from error


def _receive(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(_CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise MirrorError(_explain(error)) from error


def _continues(response: http.client.HTTPResponse, received: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {received}-")


_PIP_SECONDS = 900
_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet")
_PIP_TIMEOUT = ("--retries", "1", "--timeout", "5")


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download a wheel into `folder` with pip; only wheels are accepted, since other packages run code."""
    pip = [sys.executable, "-I", "-m", "pip", "download", *_PIP_OPTIONS, *_PIP_TIMEOUT]
    command = [*pip, "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MirrorError(f"pip download {requirement} did not work ({error})") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise MirrorError(f"pip download {requirement} did not work ({lines[-1] if lines else 'no wheel'})")
    return wheels[0]
