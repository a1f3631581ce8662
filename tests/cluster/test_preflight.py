"""A port is taken once, also by those who would share it."""

from __future__ import annotations

import socket

import pytest

from cluster.preflight import StartError, take_port


def shared_listener(port: int) -> socket.socket:
    """As HAProxy listens."""
    one = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        one.setsockopt(socket.SOL_SOCKET, option, 1)
    one.bind(("127.0.0.1", port))
    one.listen()
    return one


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_port_that_a_haproxy_shares_is_taken() -> None:
    port = free_port()
    with shared_listener(port):
        with shared_listener(port):
            pass  # the control: two who share it do not notice each other
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is taken"):
            take_port("127.0.0.1", port)


def test_a_port_that_is_held_is_taken_before_anyone_listens() -> None:
    """Two that start at the same time: the second is told, although the HAProxy of the first does not run yet."""
    port = free_port()
    with take_port("127.0.0.1", port):
        with pytest.raises(StartError, match="is taken"):
            take_port("127.0.0.1", port)
        with shared_listener(port) as own, socket.create_connection(("127.0.0.1", port), timeout=5):
            own.settimeout(5)
            own.accept()[0].close()  # and every connection comes to the HAProxy
    take_port("127.0.0.1", port).close()
