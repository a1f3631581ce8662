"""The seam between the dispatcher and its connections to replicas: a link is a dumb transport that calls back.

All of it runs on the router's one event loop. A link is one connection: it never reconnects by itself, and `lost` is
called exactly once in its life, also when connecting or the handshake failed, and also after `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from replica.contract.messages import Frame, GenerateRequest, Snapshot, Welcome


@dataclass(frozen=True, slots=True)
class Member:
    """A replica as the cluster's membership knows it: where its link listens."""

    replica_id: str
    host: str
    port: int


class ReplicaLink(Protocol):
    """One connection to one replica. Sending never blocks; after `lost` it does nothing."""

    def submit(self, requests: tuple[GenerateRequest, ...]) -> None: ...

    def cancel(self, attempts: tuple[int, ...]) -> None: ...

    def want_snapshot(self) -> None: ...

    def close(self) -> None:
        """Closes the connection; idempotent. `lost` follows."""
        ...


class LinkEvents(Protocol):
    """What a link tells its owner. Called on the event loop, in the order of the stream; must not raise."""

    def connected(self, link: ReplicaLink, welcome: Welcome) -> None: ...

    def frame(self, link: ReplicaLink, frame: Frame) -> None: ...

    def snapshot(self, link: ReplicaLink, snapshot: Snapshot) -> None: ...

    def lost(self, link: ReplicaLink, reason: str) -> None: ...


Connect = Callable[[Member, LinkEvents], ReplicaLink]
"""Starts to connect in the background and returns at once; every outcome is told through LinkEvents, never before Connect returned."""
