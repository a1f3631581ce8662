"""Who gets what: each Report of the engine becomes one frame per router, with its own deltas and everyone's load and events.

Also the bookkeeping of live attempts: an attempt enters by submit() and leaves by its finish, a bounce, a confirmed
cancel, or with its router. Runs on the event loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from replica.contract.messages import Bounce, BounceReason, Frame, GenerateRequest, LoadReport, Snapshot, TokenDelta
from replica.engine_loop import BlocksSnapshot, Report
from replica.inbox import Inbox
from replica.link_connection import RouterConnection

COALESCE_S = 0.02  # frames to a router without a stream here are merged over this
SNAPSHOT_BLOCKS_MAX = 500_000  # about 18 MB; parents come first, so what is cut off are chains' ends


@dataclass(slots=True)
class _Parts:
    """What one Report holds for one router."""

    deltas: list[TokenDelta] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    bounces: list[Bounce] = field(default_factory=list)


class Fanout:
    """`attempts_max`: live at once, of one router."""

    def __init__(self, inbox: Inbox, load: LoadReport, *, epoch: int, attempts_max: int) -> None:
        self.routers: dict[int, RouterConnection] = {}
        self.load = load
        self.sequence = 0
        self.draining = False
        self.inbox = inbox
        self._epoch = epoch
        self._attempts_max = attempts_max
        self._leaving: dict[int, None] = {}  # routers that are gone and whose attempts the engine still has to let go of

    @property
    def is_empty(self) -> bool:
        """No attempt is left, neither here nor in the engine."""
        return not self._leaving and not any(each.attempts for each in self.routers.values())

    @property
    def attempts(self) -> int:
        return sum(len(each.attempts) for each in self.routers.values())

    def join(self, connection: RouterConnection) -> None:
        self.routers[connection.owner] = connection

    def leave(self, connection: RouterConnection, *, engine_lives: bool) -> bool:
        """Cancel what it has in the engine. False: it was no router."""
        if self.routers.pop(connection.owner, None) is None:
            return False
        if connection.attempts and engine_lives:
            self._leaving[connection.owner] = None
            self.inbox.cancel_owner(connection.owner)
        connection.attempts.clear()
        return True

    def forget_leaving(self) -> None:
        """The engine is over: it holds nothing."""
        self._leaving.clear()

    def start_draining(self) -> None:
        self.draining = True
        self._set_load(self.load)
        for connection in list(self.routers.values()):
            self.send_frame(connection)

    # --- router → engine ---

    def submit(self, connection: RouterConnection, requests: tuple[GenerateRequest, ...]) -> None:
        bounces = [bounce for request in requests if (bounce := self._submit(connection, request)) is not None]
        if bounces:
            self.send_frame(connection, _Parts(bounces=bounces))

    def cancel(self, connection: RouterConnection, attempts: tuple[int, ...]) -> None:
        for attempt in attempts:
            if attempt in connection.attempts:
                self.inbox.cancel(connection.owner, attempt)

    def _submit(self, connection: RouterConnection, request: GenerateRequest) -> Bounce | None:
        if self.draining:
            return Bounce(attempt=request.attempt, reason=BounceReason.DRAINING)
        if request.attempt in connection.attempts:
            return Bounce(attempt=request.attempt, reason=BounceReason.BAD_REQUEST, message="this attempt is already live")
        if len(connection.attempts) >= self._attempts_max or not self.inbox.submit(connection.owner, request):
            return Bounce(attempt=request.attempt, reason=BounceReason.QUEUE_FULL)
        connection.attempts[request.attempt] = None
        return None

    # --- engine → routers ---

    def report(self, report: Report) -> None:
        self._set_load(report.load)
        if report.events:
            self.sequence += 1
        parts = self._sort(report)
        for owner, connection in list(self.routers.items()):
            if report.events:
                connection.events.extend(report.events)
                connection.batches += 1
            mine = parts.get(owner)
            if mine is not None or connection.attempts:
                self.send_frame(connection, mine)
            else:
                connection.flush_within(COALESCE_S)

    def snapshot(self, delivery: BlocksSnapshot) -> None:
        connection = self.routers.get(delivery.owner)
        if connection is None:
            return
        if connection.batches:
            self.send_frame(connection)  # keep the order: the snapshot is the state after these
        connection.send(Snapshot(epoch=self._epoch, sequence=self.sequence, blocks=delivery.blocks[:SNAPSHOT_BLOCKS_MAX]))

    def send_frame(self, connection: RouterConnection, parts: _Parts | None = None) -> None:
        """Everything that waits for this router, and `parts`."""
        parts = parts or _Parts()
        frame = Frame(
            epoch=self._epoch,
            sequence=self.sequence,
            load=self.load,
            deltas=tuple(parts.deltas),
            accepted=tuple(parts.accepted),
            bounces=tuple(parts.bounces),
            events=tuple(connection.events),
            batches=connection.batches,
            routers=len(self.routers),
        )
        connection.send_frame(frame)

    def _sort(self, report: Report) -> dict[int, _Parts]:
        """By router, and forget what is over. Tokens of an attempt that nobody waits for go no further."""
        parts: dict[int, _Parts] = {}
        for owner, attempt in report.accepted:
            if owner in self.routers:
                parts.setdefault(owner, _Parts()).accepted.append(attempt)
        for owner, delta in report.deltas:
            connection = self.routers.get(owner)
            if connection is None or delta.attempt not in connection.attempts:
                continue
            parts.setdefault(owner, _Parts()).deltas.append(delta)
            if delta.finish is not None:
                del connection.attempts[delta.attempt]
        for owner, bounce in report.bounces:
            connection = self.routers.get(owner)
            if connection is not None and bounce.attempt in connection.attempts:
                parts.setdefault(owner, _Parts()).bounces.append(bounce)
                del connection.attempts[bounce.attempt]
        for owner, attempt in report.cancelled:
            if owner in self.routers:
                self.routers[owner].attempts.pop(attempt, None)
        for owner in report.owners_gone:
            self._leaving.pop(owner, None)
        return parts

    def _set_load(self, load: LoadReport) -> None:
        self.load = msgspec.structs.replace(load, draining=True) if self.draining else load
