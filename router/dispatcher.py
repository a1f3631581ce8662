"""The shell around the switchboard: links, sessions, timers. Everything runs on one event loop; nothing is decided here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from random import Random

import structlog

from replica.contract.messages import EngineLimits, Frame, Snapshot, Welcome
from router.config import RouterConfig
from router.effects import CancelAttempt, Effect, Emit, Ended, Notice, Opened, Reject, Submit, WantSnapshot
from router.link import Member
from router.links import Connect, Links
from router.policy.classes import Terms
from router.policy.incarnation import Incarnation
from router.ports import Account, Batch, PoolFacts, PoolStatus, Rejected
from router.session import BatchSession, Sessions
from router.status import pool_facts, pool_status, pool_totals
from router.switchboard import Switchboard
from router.ticker import Ticker

_log = structlog.get_logger()


class Dispatcher:
    """Implements router.ports.Backend."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        connect: Connect,
        model: str,
        revision: str,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model` and `revision` are what /v1/models says until a replica has told its own."""
        self.board = Switchboard(config, seed=seed, now=clock())
        self._clock = clock
        self._named = (model, revision)
        self._links = Links(self, connect, clock, Random(seed))
        self._sessions = Sessions()
        self._limits: EngineLimits | None = None
        self._ticker = Ticker(lambda: self._carry_out(self.board.tick(clock())), lambda: self.board.tick_period_s, clock)
        self._stopping = False
        self._put_off: list[Effect] = []  # of a replica that is joining: they come before those of whatever happens next

    # --- Backend -----------------------------------------------------------------------------------------------------

    async def open(self, batch: Batch) -> BatchSession:
        if self._stopping:
            raise Rejected(503, "stopping", "this router is stopping", 1.0)
        number, effects = self.board.arrive(batch, self._clock())

        def close() -> None:
            self._sessions.drop(number)
            self._carry_out(self.board.close(number, self._clock()))

        session = BatchSession(stop=lambda index: self._carry_out(self.board.stop(number, index, self._clock())), close=close)
        self._sessions.add(number, session)
        try:
            self._carry_out(effects)
            await session.open_()
        except BaseException:
            session.close()
            raise
        return session

    def foresee(self, arrival_s: float, terms: Terms, about_tokens: int) -> Rejected | None:
        if self._stopping:
            return None
        refusal = self.board.reception.foresee(arrival_s, terms, about_tokens, self._clock())
        if refusal is None:
            return None
        self.board.traffic.tally.turned_away(refusal.reason)
        return Rejected(refusal.status, refusal.reason, refusal.message, refusal.retry_after_s)

    def facts(self) -> PoolFacts:
        return pool_facts(self.board, self._limits, self._named)

    def status(self) -> PoolStatus:
        return pool_status(self.board, self._limits, self._named, self._clock(), stopping=self._stopping)

    def account(self) -> Account:
        return Account(pool_totals(self.board, self._clock()), self.board.reception.decisions.last())

    # --- membership --------------------------------------------------------------------------------------------------

    def update_replicas(self, members: Sequence[Member]) -> None:
        """The whole set, each time. Who is missing gets no new work, and keeps its link until it closes."""
        self._links.update(members)
        self._ticker.arm()

    async def stop(self, timeout_s: float) -> None:
        """No new work; wait for what runs; then close everything. Idempotent."""
        self._stopping = True
        await self._sessions.wait_empty(timeout_s)
        for session in self._sessions.all():
            session.reject(Rejected(503, "stopping", "this router is stopping", 1.0))
            session.close()
        await self._links.close()
        self._ticker.stop()

    # --- replicas: LinksOwner ----------------------------------------------------------------------------------------

    def joined(self, welcome: Welcome) -> Incarnation | None:
        incarnation, effects = self.board.connected(welcome, self._clock())
        if incarnation is not None:
            self._limits = welcome.limits
        # The link answers for this incarnation only once we have returned.
        self._put_off += effects
        asyncio.get_running_loop().call_soon(self._carry_out, ())
        return incarnation

    def frame(self, incarnation: Incarnation, frame: Frame) -> None:
        self._carry_out(self.board.frame(incarnation, frame, self._clock()))

    def snapshot(self, incarnation: Incarnation, snapshot: Snapshot) -> None:
        self.board.fleet.index.snapshot(incarnation, snapshot)

    def leaving(self, replica_id: str, is_leaving: bool) -> None:
        self.board.leave(replica_id, is_leaving, self._clock())

    def left(self, incarnation: Incarnation) -> None:
        if self.board.fleet.get(incarnation) is not None:
            self._carry_out(self.board.lost(incarnation.replica_id, self._clock()))

    # --- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """In order. What a link cannot take comes back as an event, whose effects follow."""
        todo = [*self._put_off, *effects]
        self._put_off.clear()
        for effect in todo:
            if isinstance(effect, Emit):
                session = self._sessions.get(effect.batch_id)
                if session is not None and not session.put(effect.delta):
                    session.close()
            elif isinstance(effect, (Opened, Reject, Ended)):
                self._to_session(effect)
            elif isinstance(effect, Notice):
                _log.warning(effect.event, replica=effect.replica_id, streams=effect.streams)
            else:
                todo += self._to_replica(effect)
        self._ticker.arm()

    def _to_replica(self, effect: Submit | CancelAttempt | WantSnapshot) -> list[Effect]:
        link = self._links.of(effect.incarnation)
        if isinstance(effect, Submit):
            if link is None or not link.submit((effect.request,)):
                return self.board.undelivered(effect.incarnation, effect.request.attempt, self._clock())
        elif link is not None:
            if isinstance(effect, CancelAttempt):
                link.cancel((effect.attempt,))
            else:
                link.want_snapshot()
        return []

    def _to_session(self, effect: Opened | Reject | Ended) -> None:
        session = self._sessions.get(effect.batch_id)
        if session is None:
            return
        if isinstance(effect, Opened):
            session.opened()
        elif isinstance(effect, Reject):
            session.reject(Rejected(effect.status, effect.reason, effect.message, effect.retry_after_s))
        else:
            session.ended()
            self._sessions.drop(effect.batch_id)
