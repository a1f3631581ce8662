"""Messages between rank 0 and the other ranks of a replica: Steps one way, readiness and refusals the other.

A TCP connection per rank, opened by the rank; rank 0 listens on a port of the system's choice for as long as they come, and
tells its address through the store. Faster than a broadcast of gloo's for a message of two kilobytes, and a peer that is gone
is noticed at once: its connection ends.

    greeting  rank 0: a nonce of 32 bytes; the rank: its number, u32, and HMAC-SHA256 of nonce and number under the group's secret,
              which the ranks have from who started them: the store answers anybody
    message   little-endian: length u32, then that many bytes
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from typing import Protocol

from replica.contract.wire import handshake_mac, mac_is_valid
from replica.step import RunnerLost

MESSAGE_BYTES_MAX = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_NONCE_BYTES = 32
_HELLO = struct.Struct("<I32s")
_CHUNK = 1 << 16
_GREETING_TIMEOUT_S = 2.0  # of the whole greeting, however slowly its bytes come
_KEY = "rantang/steps"
# A node that vanishes without a word closes nothing: the kernel asks after 2 s of silence, and gives up after 3 s more.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 5_000))


class GroupBroken(RunnerLost):
    """A peer is gone, late or out of step. Nothing can be computed with this group any more."""


class Store(Protocol):
    """The part of torch's Store that is used: `get` waits for the key."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Peer:
    """One connection. Not for two threads at once, `close` excepted."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket = connection
        self._name = name
        self._buffer = bytearray()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise GroupBroken(f"{self._name} is gone: {error.strerror or error}") from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; without a timeout, as long as the peer lives. Raises GroupBroken."""
        try:
            self._socket.settimeout(timeout_s)
            if not self._buffer:  # as nearly always: a whole message comes at once
                data = self._socket.recv(_CHUNK)
                if len(data) > _LENGTH.size and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size:
                    return data[_LENGTH.size :]
                self._add(data)
            return self._next()
        except TimeoutError:
            raise GroupBroken(f"{self._name} said nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise GroupBroken(f"{self._name} is gone: {error.strerror or error}") from error

    def _next(self) -> bytes:
        """The first message of the buffer, once it is whole."""
        buffer = self._buffer
        while len(buffer) < _LENGTH.size:
            self._add(self._socket.recv(_CHUNK))
        (length,) = _LENGTH.unpack_from(buffer)
        if length > MESSAGE_BYTES_MAX:
            raise GroupBroken(f"{self._name} announces {length} bytes, {MESSAGE_BYTES_MAX} are allowed")
        end = _LENGTH.size + length
        while len(buffer) < end:
            self._add(self._socket.recv(_CHUNK))
        data = bytes(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        return data

    def close(self) -> None:
        """The other end reads its end of file, also while a thread of ours waits here."""
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _add(self, data: bytes) -> None:
        if not data:
            raise GroupBroken(f"{self._name} is gone: the connection is closed")
        self._buffer += data


class Leader:
    """Rank 0's end: a connection to every other rank."""

    def __init__(self, store: Store, size: int, host: str, secret: bytes, timeout_s: float) -> None:
        """Waits until all have come. Raises GroupBroken naming those that have not within `timeout_s`, or the address that is not ours."""
        if not secret:
            raise ValueError("the group's secret is empty")
        deadline_s = time.monotonic() + timeout_s
        peers: dict[int, Peer] = {}
        try:
            listener = socket.create_server((host, 0), backlog=size)
        except OSError as error:
            raise GroupBroken(f"rank 0 cannot listen on {host}: {error.strerror or error}") from error
        with listener:
            store.set(_KEY, f"{host} {listener.getsockname()[1]}")
            while len(peers) < size - 1:
                try:
                    if time.monotonic() > deadline_s:  # strangers come without end
                        raise TimeoutError
                    listener.settimeout(max(0.001, deadline_s - time.monotonic()))
                    connection, _ = listener.accept()
                    rank = _greeting(connection, secret)
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in peers)
                    raise GroupBroken(f"rank(s) {missing} have not come to {host} within {timeout_s:g} s") from None
                if rank is None or not 0 < rank < size or rank in peers:
                    connection.close()  # a stranger
                else:
                    peers[rank] = Peer(connection, f"rank {rank}")
        self.peers = [peers[rank] for rank in range(1, size)]

    def send(self, data: bytes) -> None:
        """To every rank."""
        for peer in self.peers:
            peer.send(data)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def follow(store: Store, rank: int, secret: bytes, timeout_s: float) -> Peer:
    """Another rank's connection to rank 0. Raises GroupBroken."""
    host, port = store.get(_KEY).decode().split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=timeout_s)
        nonce = _exactly(connection, _NONCE_BYTES, time.monotonic() + timeout_s)
        connection.sendall(_HELLO.pack(rank, handshake_mac(secret, nonce, _name(rank))))
    except OSError as error:
        raise GroupBroken(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error.strerror or error}") from error
    return Peer(connection, "rank 0")


def _greeting(connection: socket.socket, secret: bytes) -> int | None:
    """The rank that has come; None for a stranger."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    deadline_s = time.monotonic() + _GREETING_TIMEOUT_S
    try:
        connection.sendall(nonce)
        rank, mac = _HELLO.unpack(_exactly(connection, _HELLO.size, deadline_s))
    except OSError:
        return None
    return int(rank) if mac_is_valid(secret, nonce, _name(rank), mac) else None


def _exactly(connection: socket.socket, count: int, deadline_s: float) -> bytes:
    """So many bytes. Raises OSError when they have not come by then, one at a time or not at all."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the connection is closed")
        data += part
        if time.monotonic() > deadline_s:
            raise TimeoutError("the greeting takes too long")
    return data


def _name(rank: int) -> str:
    return f"rank {rank}"
