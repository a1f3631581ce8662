"""A Link without a network: records what the router sends, lets a test say what the replica answers."""

from __future__ import annotations

from collections.abc import Sequence

from replica.contract.messages import Frame, GenerateRequest, Snapshot, Welcome
from router.link import LinkListener


class FakeLink:
    """`accepting` False makes it behave like a link whose outgoing buffer is full."""

    def __init__(self, replica_id: str, listener: LinkListener) -> None:
        self.replica_id = replica_id
        self.accepting = True
        self.submitted: list[GenerateRequest] = []
        self.cancelled: list[int] = []
        self.snapshots_wanted = 0
        self._listener = listener
        self._connected = False
        self._over = False

    # --- Link ---

    @property
    def connected(self) -> bool:
        return self._connected

    def submit(self, requests: Sequence[GenerateRequest]) -> bool:
        if not (self._connected and self.accepting):
            return False
        self.submitted.extend(requests)
        return True

    def cancel(self, attempts: Sequence[int]) -> bool:
        if not (self._connected and self.accepting):
            return False
        self.cancelled.extend(attempts)
        return True

    def want_snapshot(self) -> bool:
        if not (self._connected and self.accepting):
            return False
        self.snapshots_wanted += 1
        return True

    async def close(self) -> None:
        self.lose("closed")

    # --- the replica's side ---

    def welcome(self, welcome: Welcome) -> None:
        assert not self._over
        self._connected = True
        self._listener.connected(self.replica_id, welcome)

    def frame(self, frame: Frame) -> None:
        assert self._connected
        self._listener.frame(self.replica_id, frame)

    def snapshot(self, snapshot: Snapshot) -> None:
        assert self._connected
        self._listener.snapshot(self.replica_id, snapshot)

    def lose(self, reason: str) -> None:
        self._connected = False
        if not self._over:
            self._over = True
            self._listener.lost(self.replica_id, reason)
