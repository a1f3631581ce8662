"""A page comes whole within its time and size, or not at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from bench.http_page import fetch
from bench.sampler import Sampler

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


@contextmanager
def serving(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """`answer(connection, request)` for every connection, until it hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection, connection.recv(65536))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def whole(connection: socket.socket, request: bytes) -> None:
    connection.sendall(HEAD + b"Content-Length: 4\r\n\r\n" + b"abcd")


def trickling_body(connection: socket.socket, request: bytes) -> None:
    connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def trickling_head(connection: socket.socket, request: bytes) -> None:
    connection.sendall(HEAD + b"X-Long: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def endless(connection: socket.socket, request: bytes) -> None:
    connection.sendall(HEAD + b"\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def moving(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 307 Moved\r\nLocation: /more\r\nContent-Length: 0\r\n\r\n" if b"GET /page" in request else b"")
    if b"GET /more" in request:
        whole(connection, request)


def nonsense(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"who is there?\r\n\r\n")


@pytest.mark.parametrize("answer", [whole, moving])
def test_a_page_comes_whole(answer: Callable[[socket.socket, bytes], None]) -> None:
    with serving(answer) as url:
        page = fetch(f"{url}/page", 5.0)
    assert (page.status, page.body) == (200, b"abcd")


@pytest.mark.parametrize("answer", [trickling_body, trickling_head])
def test_a_page_that_trickles_is_given_up(answer: Callable[[socket.socket, bytes], None]) -> None:
    with serving(answer) as url:
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            fetch(url, 0.3)
        assert time.monotonic() - started_s < 5.0
        sampler = Sampler(f"{url}/metrics", timeout_s=0.2)
        sampler.start()
        assert all(sample.page is None for sample in sampler.stop())
        assert time.monotonic() - started_s < 10.0


def test_a_page_without_end_is_given_up() -> None:
    with serving(endless) as url, pytest.raises(OSError, match="larger than 100000 bytes"):
        fetch(url, 10.0, bytes_max=100_000)


def test_nonsense_and_nobody_are_errors() -> None:
    with serving(nonsense) as url, pytest.raises(OSError, match="no HTTP"):
        fetch(url, 5.0)
    with pytest.raises(OSError, match="refused"):
        fetch(url.rsplit(":", 1)[0] + ":9", 5.0)
    with pytest.raises(ValueError, match="not an http"):
        fetch("file:///etc/hostname", 5.0)


def test_a_key_is_not_carried_to_another_host() -> None:
    seen: list[bytes] = []

    def keep(connection: socket.socket, request: bytes) -> None:
        seen.append(request)
        whole(connection, request)

    with serving(keep) as other:

        def away(connection: socket.socket, request: bytes) -> None:
            seen.append(request)
            connection.sendall(f"HTTP/1.1 302 Moved\r\nLocation: {other}/\r\nContent-Length: 0\r\n\r\n".encode())

        with serving(away) as url:
            assert fetch(url, 5.0, api_key="secret").body == b"abcd"
    assert [b"secret" in request for request in seen] == [True, False]
