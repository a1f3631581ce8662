"""The router's links to its members: who is to be connected, who is, and when to try again. No decision about requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import structlog

from replica.contract.messages import Frame, Snapshot, Welcome
from router.backoff import reconnect_delay_s
from router.link import Link, LinkListener, Member
from router.policy.health import Breaker
from router.policy.incarnation import Incarnation

Connect = Callable[[Member, LinkListener], Link]
"""Makes and starts a link; it tells the listener everything, never before Connect has returned."""

_log = structlog.get_logger()


class LinksOwner(Protocol):
    """Hears of replicas; calls for one incarnation are joined, then frames and snapshots, then left."""

    def joined(self, welcome: Welcome) -> Incarnation | None:
        """None: it is of another pool and is not to be used."""
        ...

    def frame(self, incarnation: Incarnation, frame: Frame) -> None: ...

    def snapshot(self, incarnation: Incarnation, snapshot: Snapshot) -> None: ...

    def leaving(self, replica_id: str, is_leaving: bool) -> None:
        """Membership let a connected replica go, or has it (again)."""
        ...

    def left(self, incarnation: Incarnation) -> None: ...


class Connection:
    """One link and the incarnation at its other end; late calls of an old link end here. Implements LinkListener."""

    def __init__(self, links: Links, member: Member) -> None:
        self._links = links
        self.member = member
        self.link: Link | None = None
        self.incarnation: Incarnation | None = None
        self.is_over = False

    def connected(self, replica_id: str, welcome: Welcome) -> None:
        if not self.is_over:
            self._links.on_connected(self, welcome)

    def frame(self, replica_id: str, frame: Frame) -> None:
        if self.incarnation is not None and not self.is_over:
            self._links.owner.frame(self.incarnation, frame)

    def snapshot(self, replica_id: str, snapshot: Snapshot) -> None:
        if self.incarnation is not None and not self.is_over:
            self._links.owner.snapshot(self.incarnation, snapshot)

    def lost(self, replica_id: str, reason: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._links.on_lost(self, reason)


class Links:
    """At most one connection per member."""

    def __init__(self, owner: LinksOwner, connect: Connect, clock: Callable[[], float], random: Random) -> None:
        self.owner = owner
        self._connect = connect
        self._clock = clock
        self._random = random
        self._members: dict[str, Member] = {}
        self._connections: dict[str, Connection] = {}
        self._breakers: dict[str, Breaker] = {}
        self._refused: dict[str, str] = {}  # replica → fingerprint, so that it is said once
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, members: Sequence[Member]) -> None:
        """The whole set, each time. Who is missing keeps its link until it closes."""
        self._members = {member.replica_id: member for member in members}
        for replica_id, connection in tuple(self._connections.items()):
            if self._members.get(replica_id) == connection.member:
                self.owner.leaving(replica_id, False)
            elif connection.incarnation is None or replica_id in self._members:  # not connected yet, or it lives elsewhere now
                self._shut(connection)
            else:
                self.owner.leaving(replica_id, True)
        for remembered in (self._breakers, self._refused):
            for gone in [replica_id for replica_id in remembered if replica_id not in self._members]:
                del remembered[gone]
        for replica_id in self._members:
            self._try(replica_id)

    def of(self, incarnation: Incarnation) -> Link | None:
        """The link to it, if it is still the one that is connected."""
        connection = self._connections.get(incarnation.replica_id)
        return connection.link if connection is not None and connection.incarnation == incarnation else None

    async def close(self) -> None:
        """Close all; idempotent."""
        self._members = {}
        for connection in tuple(self._connections.values()):
            self._shut(connection)
        if self._closing:
            await asyncio.wait(self._closing)

    # --- what connections tell ---------------------------------------------------------------------------------------

    def on_connected(self, connection: Connection, welcome: Welcome) -> None:
        replica_id = welcome.replica_id
        connection.incarnation = self.owner.joined(welcome)
        if connection.incarnation is None:
            if self._refused.get(replica_id) != welcome.fingerprint:
                self._refused[replica_id] = welcome.fingerprint
                _log.warning("replica of another pool is not used", replica=replica_id, fingerprint=welcome.fingerprint)
            self._shut(connection)
            return
        self._refused.pop(replica_id, None)
        self._breaker(replica_id).connected(self._clock())
        _log.info("replica connected", replica=replica_id, epoch=welcome.epoch)

    def on_lost(self, connection: Connection, reason: str) -> None:
        replica_id = connection.member.replica_id
        if self._connections.get(replica_id) is connection:
            del self._connections[replica_id]
        if connection.incarnation is not None:
            if self._members:
                _log.warning("link lost", replica=replica_id, reason=reason)
            self.owner.left(connection.incarnation)
        if replica_id in self._members:
            delay_s = reconnect_delay_s(self._breaker(replica_id).failed(self._clock()), self._random.random())
            asyncio.get_running_loop().call_later(delay_s, self._try, replica_id)

    # --- within ------------------------------------------------------------------------------------------------------

    def _breaker(self, replica_id: str) -> Breaker:
        return self._breakers.setdefault(replica_id, Breaker())

    def _try(self, replica_id: str) -> None:
        member = self._members.get(replica_id)
        if member is None or replica_id in self._connections:
            return
        connection = Connection(self, member)
        self._connections[replica_id] = connection
        connection.link = self._connect(member, connection)

    def _shut(self, connection: Connection) -> None:
        """Close a link; `lost` comes from it, now or later."""
        assert connection.link is not None
        task = asyncio.get_running_loop().create_task(connection.link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
