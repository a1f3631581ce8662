"""Reading request bodies: bounded in size, in time, and together in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Receive

from router.api.errors import ApiError
from router.api.limits import BODY_BYTES_MAX, BODY_BYTES_READING_MAX, BODY_BYTES_UNCOUNTED, BODY_SECONDS_MAX
from router.api.rest_of import RestOf

_JSON = "application/json"


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
    reading = _read(receive, budget)
    try:
        waits_for = reading.send(None)
    except StopIteration as read:
        return read.value  # type: ignore[no-any-return]  # most often it is all there, and needs no timer
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            return await RestOf(reading, waits_for)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS_MAX:g} s", headers={"connection": "close"}) from None


def check_body_headers(headers: Mapping[str, str]) -> None:
    """What can be refused before a byte of the body is read."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted: send it without Content-Encoding")
    kind = headers.get("content-type", _JSON)
    if kind != _JSON:
        kind = kind.split(";")[0].strip().lower()
        if kind != _JSON and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(415, "the body must be sent as Content-Type: application/json")
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise ApiError(400, "Content-Length is not a number")
    if len(length) > 18 or int(length) > BODY_BYTES_MAX:
        raise _too_large()


async def _read(receive: Receive, budget: BodyBudget) -> bytes:
    chunk, is_last = _chunk(await receive())
    if is_last:
        return chunk
    reader = budget.begin()
    try:
        return await _read_on(chunk, receive, budget, reader)
    finally:
        budget.end(reader)


async def _read_on(chunk: bytes, receive: Receive, budget: BodyBudget, reader: object) -> bytes:
    """After the first chunk, which is not the last."""
    chunks, size, counted = [chunk], len(chunk), 0
    while True:
        over = size - BODY_BYTES_UNCOUNTED - counted
        if over > 0:
            await budget.take(reader, over)
            counted += over
        chunk, is_last = _chunk(await receive())
        size += len(chunk)
        if size > BODY_BYTES_MAX:
            raise _too_large()
        chunks.append(chunk)
        if is_last:
            return b"".join(chunks)


def _chunk(message: Message) -> tuple[bytes, bool]:
    """What came, and whether it is the last."""
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    chunk: bytes = message.get("body", b"")
    if len(chunk) > BODY_BYTES_MAX:
        raise _too_large()
    return chunk, not message.get("more_body", False)


def _too_large() -> ApiError:
    # The rest of the body is not read: the connection cannot be used again.
    return ApiError(413, f"the body exceeds {BODY_BYTES_MAX} bytes", code="body_too_large", headers={"connection": "close"})
