"""Reading request bodies: bounded in size, in time, and together in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive

from router.api.errors import ApiError
from router.api.limits import BODY_BYTES_MAX, BODY_BYTES_READING_MAX, BODY_BYTES_UNCOUNTED, BODY_SECONDS_MAX


class ClientDisconnected(Exception):
    """Nobody is there to answer."""


class BodyBudget:
    """Bytes that all bodies being read may hold. Who finds it used up waits, before reading on.

    Room for one whole body is kept back for one reader at a time, the first that needs it: so some reader can always
    finish and nobody waits in a ring.
    """

    __slots__ = ("_changed", "_favoured", "_held", "limit_bytes")

    def __init__(self, limit_bytes: int = BODY_BYTES_READING_MAX) -> None:
        assert limit_bytes >= 2 * BODY_BYTES_MAX, "a budget that one body alone could use up"
        self.limit_bytes = limit_bytes
        self._held: dict[object, int] = {}  # by reader
        self._favoured: object | None = None  # may use the room kept back, until its end
        self._changed: asyncio.Event | None = None  # set when room appears; only while someone waits

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def begin(self) -> object:
        reader = object()
        self._held[reader] = 0
        return reader

    async def take(self, reader: object, size: int) -> None:
        """Count `size` more bytes for this reader, or wait until they fit."""
        while not self._fits(reader, size):
            self._changed = self._changed or asyncio.Event()
            await self._changed.wait()
        self._held[reader] += size

    def end(self, reader: object) -> None:
        del self._held[reader]
        if self._favoured is reader:
            self._favoured = None
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _fits(self, reader: object, size: int) -> bool:
        if reader is self._favoured:
            return True  # one body at most, and room for one is kept
        ordinary = self.held_bytes - self._held.get(self._favoured, 0)
        if ordinary + size <= self.limit_bytes - BODY_BYTES_MAX:
            return True
        if self._favoured is None:
            self._favoured = reader
        return self._favoured is reader


async def read_json_body(receive: Receive, headers: Mapping[str, str], budget: BodyBudget) -> bytes:
    """The whole body. Raises ApiError 408, 413 or 415, or ClientDisconnected."""
    check_body_headers(headers)
    reader = budget.begin()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            return await _read(receive, budget, reader)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS_MAX:g} s", headers={"connection": "close"}) from None
    finally:
        budget.end(reader)


def check_body_headers(headers: Mapping[str, str]) -> None:
    """What can be refused before a byte of the body is read."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted: send it without Content-Encoding")
    kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "the body must be sent as Content-Type: application/json")
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise ApiError(400, "Content-Length is not a number")
    if len(length) > 18 or int(length) > BODY_BYTES_MAX:
        raise _too_large()


async def _read(receive: Receive, budget: BodyBudget, reader: object) -> bytes:
    chunks: list[bytes] = []
    size = counted = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > BODY_BYTES_MAX:
            raise _too_large()
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
        over = size - BODY_BYTES_UNCOUNTED - counted
        if over > 0:
            await budget.take(reader, over)
            counted += over


def _too_large() -> ApiError:
    # The rest of the body is not read: the connection cannot be used again.
    return ApiError(413, f"the body exceeds {BODY_BYTES_MAX} bytes", code="body_too_large", headers={"connection": "close"})
