"""One page of a server by GET, within a time and a size, whatever the server does: trickle, never end, or send without end."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

BYTES_MAX = 4 * 1024 * 1024
REDIRECTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    body: bytes


def fetch(url: str, timeout_s: float, *, api_key: str = "", bytes_max: int = BYTES_MAX) -> Page:
    """Raises OSError when it did not come whole in `timeout_s`, or is larger than `bytes_max`; ValueError for no http(s) URL."""
    deadline_s = time.monotonic() + timeout_s
    host = urlsplit(url).netloc
    for _ in range(REDIRECTS_MAX + 1):
        key = api_key if urlsplit(url).netloc == host else ""  # a key goes nowhere else
        try:
            page, location = _one(url, deadline_s, key, bytes_max)
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP: {type(error).__name__}") from error
        if location is None:
            return page
        url = urljoin(url, location)
    raise OSError("redirected without end")


def _one(url: str, deadline_s: float, api_key: str, bytes_max: int) -> tuple[Page, str | None]:
    """The page, and where it moved to if it did."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {url!r}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_left_s(deadline_s))
    with contextlib.closing(connection):
        connection.connect()
        with _ended_at(connection.sock, deadline_s):
            headers = {"Connection": "close", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers=headers)
            answer = connection.getresponse()
            body = answer.read(bytes_max + 1)
        if len(body) > bytes_max:
            raise OSError(f"the page is larger than {bytes_max} bytes")
        return Page(answer.status, body), answer.headers["Location"] if 300 <= answer.status < 400 else None


@contextlib.contextmanager
def _ended_at(sock: socket.socket, deadline_s: float) -> Iterator[None]:
    """Shuts the socket down at the deadline and raises TimeoutError: a socket's own time limit begins anew with every byte."""
    over = threading.Event()

    def end() -> None:
        over.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left_s(deadline_s), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError):
        if not over.is_set():
            raise
    finally:
        timer.cancel()
    if over.is_set():
        raise TimeoutError("the page did not come in time")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the page did not come in time")
    return left_s
