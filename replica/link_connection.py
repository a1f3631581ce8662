"""One router's connection to a replica: bytes in, bytes out, the handshake, and what waits to be sent.

Knows no engine. It tells its LinkServer (`ConnectionHost`) what happened.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Protocol, cast

from replica.contract import wire
from replica.contract.messages import PROTOCOL_VERSION, Challenge, Frame, Hello, KvEvent, Refused, ToReplica, ToRouter

HELLO_BYTES_MAX = 4096  # of any frame before the peer has proven that it knows the secret
SUBMIT_BYTES_MAX = 32 * 1024 * 1024  # of any frame after it
ROUTER_ID_CHARS_MAX = 256
NONCE_BYTES = 32


class ConnectionHost(Protocol):
    handshake_timeout_s: float
    unsent_bytes_max: int

    def refusal(self) -> str:
        """Why no new connection is taken now; empty: it is."""
        ...

    def opened(self, connection: RouterConnection) -> None: ...

    def hello(self, connection: RouterConnection, message: Hello) -> None: ...

    def received(self, connection: RouterConnection, message: ToReplica) -> None: ...

    def closed(self, connection: RouterConnection, reason: str) -> None: ...

    def flush(self, connection: RouterConnection) -> None:
        """Send what waits in `connection` as one frame."""
        ...


class RouterConnection(asyncio.Protocol):
    """`owner` names the connection in the engine; it is never reused."""

    def __init__(self, host: ConnectionHost, owner: int) -> None:
        self.owner = owner
        self.router_id = ""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.authenticated = False
        self.attempts: dict[int, None] = {}  # submitted here and not over
        self.events: list[KvEvent] = []  # not sent yet: of the last `batches` steps that had any
        self.batches = 0
        self.last_sent_s = 0.0
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._splitter = wire.FrameSplitter(HELLO_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._reason = ""  # why it closes, when we decided so

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        set_socket_options(transport.get_extra_info("socket"))
        refusal = self._host.refusal()
        if refusal:
            self.refuse(refusal)
            return
        self._host.opened(self)
        self._deadline = self._loop.call_later(self._host.handshake_timeout_s, self.refuse, "no hello in time")
        self.send(Challenge(protocol=PROTOCOL_VERSION, nonce=self.nonce))

    def data_received(self, data: bytes) -> None:
        if self._reason:
            return  # closing: nothing more is heard
        try:
            for body in self._splitter.feed(data):
                self._heard(wire.decode_to_replica(body))
        except wire.WireError as error:
            self.cut(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._flush_timer):
            if timer is not None:
                timer.cancel()
        self._transport = None
        self._host.closed(self, self._reason or (f"connection lost: {exc}" if exc else "closed by the router"))

    # --- what the LinkServer calls ---

    def admit(self, router_id: str) -> None:
        """The peer has proven itself."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.authenticated = True
        self.router_id = router_id
        self._splitter.max_bytes = SUBMIT_BYTES_MAX

    def send(self, message: ToRouter) -> None:
        """Cuts the connection when the peer leaves more than the host's `unsent_bytes_max` unread, or a frame is too large."""
        transport = self._transport
        if transport is None or self._reason:
            return
        try:
            data = wire.encode(message)
        except wire.WireError as error:  # this router loses its streams; raised, it would cost the others their tokens
            self.cut(str(error))
            return
        transport.write(data)
        self.last_sent_s = self._loop.time()
        unsent = transport.get_write_buffer_size()
        if unsent > self._host.unsent_bytes_max:
            self.cut(f"the router is too slow: {unsent} bytes unsent")

    def send_frame(self, frame: Frame) -> None:
        """`frame` carries everything that waited."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self.events.clear()
        self.batches = 0
        self.send(frame)

    def flush_within(self, delay_s: float) -> None:
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(delay_s, self._flush_now)

    def refuse(self, reason: str) -> None:
        """End the handshake: say why, then close."""
        self.send(Refused(reason=reason))
        self._reason = self._reason or f"refused: {reason}"
        if self._transport is not None:
            self._transport.close()

    def cut(self, reason: str) -> None:
        """Close without a word. Whatever is unsent is lost."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def _flush_now(self) -> None:
        self._flush_timer = None
        self._host.flush(self)

    def _heard(self, message: ToReplica) -> None:
        if self._reason:
            return  # what came before in the same bytes has closed the connection
        if self.authenticated:
            if isinstance(message, Hello):
                raise wire.WireError("a second hello")
            self._host.received(self, message)
        elif isinstance(message, Hello):
            self._host.hello(self, message)
        else:
            raise wire.WireError("a frame before the handshake")


def set_socket_options(sock: socket.socket) -> None:
    """No delay for small frames; a peer that vanished without a word is noticed within 10 s of unacknowledged data."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
