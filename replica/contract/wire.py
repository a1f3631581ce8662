"""Frames on a byte stream: 4 bytes of length (little-endian), then msgpack. Never pickle.

The first three frames authenticate: replica → Challenge(nonce), router → Hello(mac), replica → Welcome or Refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct

import msgspec

from replica.contract.messages import ToReplica, ToRouter

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH_BYTES = 4
_length = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
_to_router: msgspec.msgpack.Decoder[ToRouter] = msgspec.msgpack.Decoder(ToRouter)


class WireError(Exception):
    """The peer sent something that is not a frame of ours: close the connection."""


def encode(message: ToReplica | ToRouter) -> bytes:
    """A whole frame, ready to be written. Raises WireError above MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def read_body(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The next frame's body. Raises WireError for an oversized one, IncompleteReadError at the end of the stream."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if length > max_bytes:
        raise WireError(f"frame of {length} bytes exceeds {max_bytes}")
    return await reader.readexactly(length)


class FrameSplitter:
    """Cuts the bytes of one connection into frame bodies. `max_bytes` may be raised when the peer has proven itself."""

    __slots__ = ("_buffer", "max_bytes")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes. Raises WireError as soon as a frame announces more than `max_bytes`."""
        if not self._buffer:  # mostly whole frames come
            bodies, end = self._cut(data)
            self._buffer += data[end:]
            return bodies
        self._buffer += data
        bodies, end = self._cut(self._buffer)
        del self._buffer[:end]
        return bodies

    def _cut(self, data: bytes | bytearray) -> tuple[list[bytes], int]:
        """The whole bodies in `data`, and where what is unfinished begins."""
        bodies: list[bytes] = []
        start, available = 0, len(data)
        while available - start >= _LENGTH_BYTES:
            (length,) = _length.unpack_from(data, start)
            if length > self.max_bytes:
                raise WireError(f"frame of {length} bytes exceeds {self.max_bytes}")
            end = start + _LENGTH_BYTES + length
            if end > available:
                break
            bodies.append(bytes(data[start + _LENGTH_BYTES : end]))
            start = end
        return bodies, start


def decode_to_replica(body: bytes) -> ToReplica:
    try:
        return _to_replica.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"unreadable frame: {error}") from error


def decode_to_router(body: bytes) -> ToRouter:
    try:
        return _to_router.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"unreadable frame: {error}") from error


def handshake_mac(secret: bytes, nonce: bytes, router_id: str) -> bytes:
    """Proof that a router knows the cluster's secret, bound to this connection's nonce."""
    return hmac.new(secret, nonce + router_id.encode(), hashlib.sha256).digest()


def mac_is_valid(secret: bytes, nonce: bytes, router_id: str, mac: bytes) -> bool:
    return hmac.compare_digest(handshake_mac(secret, nonce, router_id), mac)
