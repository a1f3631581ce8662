"""The replica's end of the link: a TCP server that many routers connect to, one connection each.

Runs on the event loop's thread. Here is the door: listening, the handshake, the bounds, the heartbeat, the drain. What
passes through it, in both directions, is replica.fanout's.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

import structlog

from replica.contract import wire
from replica.contract.messages import (
    PROTOCOL_VERSION,
    Cancel,
    EngineLimits,
    Hello,
    LoadReport,
    Submit,
    ToReplica,
    WantSnapshot,
    Welcome,
)
from replica.engine_loop import BlocksSnapshot, Delivery, Report
from replica.fanout import Fanout
from replica.inbox import Inbox
from replica.link_connection import ROUTER_ID_CHARS_MAX, RouterConnection

HEARTBEAT_S = 0.5  # a router that has heard nothing for this long gets a frame with the load

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Who a router is told it speaks to. `epoch` is new for every start of an engine."""

    replica_id: str
    epoch: int
    model: str
    revision: str
    fingerprint: str
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class LinkLimits:
    handshake_timeout_s: float = 5.0
    strangers_max: int = 64  # connections that have not authenticated yet
    routers_max: int = 256
    unsent_bytes_max: int = 64 * 1024 * 1024  # of one router, then it is cut; above the largest Snapshot
    attempts_max: int = 16_384  # live at once, of one router


class LinkServer:
    """start(), `deliver` is the engine loop's callback, drain(), stop()."""

    def __init__(
        self,
        incarnation: Incarnation,
        inbox: Inbox,
        load: LoadReport,
        secret: bytes,
        *,
        limits: LinkLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`load` is what routers hear until the engine's first report."""
        if not secret:
            raise ValueError("the link's secret is empty")
        self._me = incarnation
        self._secret = secret
        self._limits = limits or LinkLimits()
        self._tls = tls
        self.handshake_timeout_s = self._limits.handshake_timeout_s
        self.unsent_bytes_max = self._limits.unsent_bytes_max
        self.fanout = Fanout(inbox, load, epoch=incarnation.epoch, attempts_max=self._limits.attempts_max)
        self._server: asyncio.Server | None = None
        self._strangers: dict[int, RouterConnection] = {}
        self._last_owner = 0
        self._over = ""  # why no connection is taken any more
        self._empty = asyncio.Event()
        self._beat_timer: asyncio.TimerHandle | None = None

    async def start(self, host: str) -> tuple[str, int]:
        """Listen on a free port of `host`; returns the address."""
        loop = asyncio.get_running_loop()
        timeout_s = self._limits.handshake_timeout_s if self._tls else None
        self._server = await loop.create_server(self._new_connection, host, 0, ssl=self._tls, backlog=128, ssl_handshake_timeout=timeout_s)
        self._beat()
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def drain(self, timeout_s: float) -> bool:
        """Take no new attempt; True once none is left, False when `timeout_s` has passed before."""
        self.fanout.start_draining()
        self._note_emptiness()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, reason: str = "the replica stops") -> None:
        """Close every connection. Idempotent."""
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None
        if self._server is not None:
            self._server.close()
        self._end(reason)
        await asyncio.sleep(0)  # let the connections hear of it

    def deliver(self, delivery: Delivery) -> None:
        """What the engine says (replica.engine_loop)."""
        if isinstance(delivery, Report):
            self.fanout.report(delivery)
        elif isinstance(delivery, BlocksSnapshot):
            self.fanout.snapshot(delivery)
        else:
            if delivery.reason:
                _log.error("engine ended", reason=delivery.reason)
            self._end(delivery.reason or "the engine has stopped")  # routers move their streams elsewhere
            self.fanout.forget_leaving()
        self._note_emptiness()

    def _end(self, reason: str) -> None:
        self._over = self._over or reason
        for connection in [*self._strangers.values(), *self.fanout.routers.values()]:
            connection.cut(reason)

    # --- what connections call ---

    def refusal(self) -> str:
        if self._over:
            return self._over
        if len(self._strangers) >= self._limits.strangers_max or len(self.fanout.routers) >= self._limits.routers_max:
            return "too many connections"
        return ""

    def opened(self, connection: RouterConnection) -> None:
        self._strangers[connection.owner] = connection

    def hello(self, connection: RouterConnection, message: Hello) -> None:
        if message.protocol != PROTOCOL_VERSION:
            connection.refuse(f"protocol {message.protocol}, this replica speaks {PROTOCOL_VERSION}")
        elif not 0 < len(message.router_id) <= ROUTER_ID_CHARS_MAX:
            connection.refuse("router_id is empty or too long")
        elif not wire.mac_is_valid(self._secret, connection.nonce, message.router_id, message.mac):
            connection.refuse("wrong secret")
        else:
            self._admit(connection, message.router_id)

    def _admit(self, connection: RouterConnection, router_id: str) -> None:
        for other in [each for each in self.fanout.routers.values() if each.router_id == router_id]:
            other.cut("the router has connected again")
        del self._strangers[connection.owner]
        connection.admit(router_id)
        self.fanout.join(connection)
        me = self._me
        connection.send(
            Welcome(
                protocol=PROTOCOL_VERSION,
                replica_id=me.replica_id,
                epoch=me.epoch,
                model=me.model,
                revision=me.revision,
                fingerprint=me.fingerprint,
                limits=me.limits,
                load=self.fanout.load,
            )
        )

    def received(self, connection: RouterConnection, message: ToReplica) -> None:
        if isinstance(message, Submit):
            self.fanout.submit(connection, message.requests)
        elif isinstance(message, Cancel):
            self.fanout.cancel(connection, message.attempts)
        elif isinstance(message, WantSnapshot):
            self.fanout.inbox.want_snapshot(connection.owner)

    def closed(self, connection: RouterConnection, reason: str) -> None:
        self._strangers.pop(connection.owner, None)
        if self.fanout.leave(connection, engine_lives=not self._over):
            _log.info("router left", router=connection.router_id, reason=reason)
        self._note_emptiness()

    def flush(self, connection: RouterConnection) -> None:
        self.fanout.send_frame(connection)

    # --- inside ---

    def _new_connection(self) -> RouterConnection:
        self._last_owner += 1
        return RouterConnection(self, self._last_owner)

    def _note_emptiness(self) -> None:
        if self.fanout.draining and self.fanout.is_empty:
            self._empty.set()

    def _beat(self) -> None:
        """Report the load to every router that has heard nothing for HEARTBEAT_S."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        due_s = now_s + HEARTBEAT_S
        for connection in list(self.fanout.routers.values()):
            if now_s - connection.last_sent_s >= HEARTBEAT_S - 0.001:
                self.flush(connection)
            due_s = min(due_s, connection.last_sent_s + HEARTBEAT_S)
        self._beat_timer = loop.call_at(max(due_s, now_s + 0.01), self._beat)
