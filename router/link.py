"""The router's end of the link: one LinkClient is one connection to one replica.

Dumb transport: it authenticates, decodes, and hands typed messages on. Gaps in the KV events are the prefix index's
business, coming back after a loss is its owner's (a new LinkClient, after router.backoff's delay).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from replica.contract import wire
from replica.contract.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Challenge,
    Frame,
    GenerateRequest,
    Hello,
    Refused,
    Snapshot,
    Submit,
    ToReplica,
    ToRouter,
    WantSnapshot,
    Welcome,
)
from router.gathering import gathered

CONNECT_TIMEOUT_S = 5.0  # until Welcome
SILENCE_MAX_S = 10.0  # a replica reports every 0.5 s; after this the connection counts as dead
UNSENT_BYTES_MAX = 64 * 1024 * 1024
SUBMIT_BYTES = 8 * 1024 * 1024  # a Submit is cut into frames of about this, well below what a replica takes
_BYTES_PER_TOKEN = 5  # of a token id in msgpack, at most
_BYTES_PER_KEY = 18
_BYTES_PER_REQUEST = 512


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that can be reached."""

    replica_id: str
    host: str
    port: int


class LinkListener(Protocol):
    """Called on the event loop, after start() has returned. `lost` is the last call of a link, and comes exactly once."""

    def connected(self, replica_id: str, welcome: Welcome) -> None: ...

    def frame(self, replica_id: str, frame: Frame) -> None: ...

    def snapshot(self, replica_id: str, snapshot: Snapshot) -> None: ...

    def lost(self, replica_id: str, reason: str) -> None: ...


class Link(Protocol):
    """What a dispatcher needs of a link. Nothing here blocks."""

    @property
    def connected(self) -> bool: ...

    def submit(self, requests: Sequence[GenerateRequest]) -> bool:
        """False: not connected, or too much is unsent; then nothing of it was sent."""
        ...

    def cancel(self, attempts: Sequence[int]) -> bool: ...

    def want_snapshot(self) -> bool: ...

    async def close(self) -> None: ...


class LinkClient:
    """A Link over TCP. start() returns at once; the listener hears how it went."""

    def __init__(
        self,
        member: Member,
        *,
        router_id: str,
        secret: bytes,
        listener: LinkListener,
        tls: ssl.SSLContext | None = None,
        silence_max_s: float = SILENCE_MAX_S,
        unsent_bytes_max: int = UNSENT_BYTES_MAX,
    ) -> None:
        self.member = member
        self.router_id = router_id
        self.secret = secret
        self.listener = listener
        self._tls = tls
        self._silence_max_s = silence_max_s
        self._unsent_bytes_max = unsent_bytes_max
        self._conversation: _Conversation | None = None
        self._task: asyncio.Task[str] | None = None

    @property
    def connected(self) -> bool:
        return self._conversation is not None and self._conversation.is_open

    def start(self) -> None:
        assert self._task is None, "a link starts once"
        self._task = asyncio.get_running_loop().create_task(self._converse(), name=f"link to {self.member.replica_id}")
        self._task.add_done_callback(self._over)  # not a `finally`: a task cancelled before its first turn runs none

    async def close(self) -> None:
        """Idempotent. The replica cancels what it still has of us; the listener hears `lost`."""
        if self._conversation is not None:
            self._conversation.cut("closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def submit(self, requests: Sequence[GenerateRequest]) -> bool:
        return self._send_all([Submit(requests=part) for part in _cut(requests)])

    def cancel(self, attempts: Sequence[int]) -> bool:
        return self._send_all([Cancel(attempts=tuple(attempts))])

    def want_snapshot(self) -> bool:
        return self._send_all([WantSnapshot()])

    def _send_all(self, messages: Sequence[ToReplica]) -> bool:
        conversation = self._conversation
        if conversation is None or not conversation.is_open or conversation.unsent_bytes() > self._unsent_bytes_max:
            return False
        for message in messages:
            conversation.send(message)
        return True

    def _over(self, task: asyncio.Task[str]) -> None:
        reason = "closed" if task.cancelled() else str(task.exception() or task.result())
        if self._conversation is not None:
            self._conversation.cut(reason)
        self.listener.lost(self.member.replica_id, reason)

    async def _converse(self) -> str:
        """From connecting to the end of the one connection; returns why it ended."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, conversation = await loop.create_connection(
                    lambda: _Conversation(self), self.member.host, self.member.port, ssl=self._tls
                )
                self._conversation = conversation
                await conversation.welcomed.wait()
        except TimeoutError:
            return f"no welcome from {self.member.host}:{self.member.port} within {CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            return f"cannot connect to {self.member.host}:{self.member.port}: {error}"
        while not conversation.ended.done():
            quiet_s = loop.time() - conversation.heard_at_s
            if quiet_s >= self._silence_max_s:
                return f"nothing heard for {quiet_s:.1f} s"
            await asyncio.wait([conversation.ended], timeout=self._silence_max_s - quiet_s)
        return conversation.ended.result()


class _Conversation(asyncio.Protocol):
    """The bytes of one connection. `ended` is done, with the reason, when it is over."""

    def __init__(self, client: LinkClient) -> None:
        self._client = client
        self._replica_id = client.member.replica_id
        self._listener = client.listener
        self._splitter = wire.FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self.heard_at_s = self._loop.time()
        self.welcomed = asyncio.Event()  # set by Welcome, and by the end
        self.is_open = False
        self.ended: asyncio.Future[str] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        self.heard_at_s = self._loop.time()
        try:
            for message in gathered(map(wire.decode_to_router, self._splitter.feed(data))):
                self._heard(message)
        except wire.WireError as error:
            self.cut(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}" if exc else "closed by the replica")

    def send(self, message: ToReplica) -> None:
        assert self._transport is not None
        self._transport.write(wire.encode(message))

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def cut(self, reason: str) -> None:
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        self.is_open = False
        if not self.ended.done():
            self.ended.set_result(reason)
        self.welcomed.set()

    def _heard(self, message: ToRouter) -> None:
        if self.ended.done():
            return
        if isinstance(message, Frame) and self.is_open:
            self._listener.frame(self._replica_id, message)
        elif isinstance(message, Snapshot) and self.is_open:
            self._listener.snapshot(self._replica_id, message)
        elif isinstance(message, Refused):
            self.cut(f"refused: {message.reason}")
        elif isinstance(message, Challenge) and not self.is_open:
            self._answer(message)
        elif isinstance(message, Welcome) and not self.is_open:
            self._welcome(message)
        else:
            raise wire.WireError(f"{type(message).__name__} out of turn")

    def _answer(self, challenge: Challenge) -> None:
        if challenge.protocol != PROTOCOL_VERSION:
            self.cut(f"protocol {challenge.protocol}, this router speaks {PROTOCOL_VERSION}")
            return
        client = self._client
        mac = wire.handshake_mac(client.secret, challenge.nonce, client.router_id)
        self.send(Hello(protocol=PROTOCOL_VERSION, router_id=client.router_id, mac=mac))

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.replica_id != self._replica_id:
            self.cut(f"this is {welcome.replica_id}, not {self._replica_id}")
            return
        self.is_open = True
        self.welcomed.set()
        self._listener.connected(self._replica_id, welcome)


def _cut(requests: Sequence[GenerateRequest]) -> list[tuple[GenerateRequest, ...]]:
    """In order, in parts of about SUBMIT_BYTES."""
    parts: list[tuple[GenerateRequest, ...]] = []
    part: list[GenerateRequest] = []
    size = 0
    for request in requests:
        tokens = len(request.prompt_ids) + len(request.emitted_ids)
        cost = _BYTES_PER_REQUEST + tokens * _BYTES_PER_TOKEN + len(request.block_keys) * _BYTES_PER_KEY
        if part and size + cost > SUBMIT_BYTES:
            parts.append(tuple(part))
            part, size = [], 0
        part.append(request)
        size += cost
    if part:
        parts.append(tuple(part))
    return parts
