"""What every request passes: authorization on the way in, headers and counters on the way out."""

import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from convolve.errors import ConvolveError
from convolve.serving.requests import RequestError

RawHeaders = list[tuple[bytes, bytes]]

SECURITY_HEADERS: RawHeaders = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"permissions-policy", b"camera=(self), microphone=(), geolocation=()"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


@dataclass
class Gate:
    """Decides about requests by their headers. `hosts` are the allowed Host headers (None: all)."""

    hosts: frozenset[str] | None
    token: str | None
    public_paths: Collection[str]
    draining: bool = False

    def authorize(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise RequestError if a request must not be handled."""
        if self.hosts is not None and _hostname(headers.get("host", "")) not in self.hosts:
            raise RequestError(403, "Host header not allowed")
        if path in self.public_paths:
            return
        if not _is_same_origin(headers):
            raise RequestError(403, "cross-origin request not allowed")
        if self.token is None:
            return
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(credentials.strip().encode(), self.token.encode()):
            raise RequestError(401, "missing or invalid token; send Authorization: Bearer <token>")

    def response_headers(self, status: int) -> RawHeaders:
        """Return the headers that a response gets besides those of its content."""
        headers = SECURITY_HEADERS
        if status == 429:
            headers = [*headers, (b"retry-after", b"1")]
        if self.draining or status in (408, 413):
            headers = [*headers, (b"connection", b"close")]
        return headers


def read_headers(headers: RawHeaders) -> dict[str, str]:
    """Return the headers of a request by name in lower case; the first of several counts."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(headers)}


def describe_error(error: ConvolveError) -> tuple[int, dict[str, str]]:
    """Return status and content of the response to a request that failed."""
    return error.status if isinstance(error, RequestError) else 500, {"error": str(error)}


def _is_same_origin(headers: Mapping[str, str]) -> bool:
    """Return False for a request that a page of another site made; programs send neither header."""
    if headers.get("sec-fetch-site", "none").lower() not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").strip().lower()


def _hostname(header: str) -> str:
    host = header.strip().lower()
    return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
