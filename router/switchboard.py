"""The router's decisions as one pure object: events in, effects out. The dispatcher's shell drives it with sockets and the
real clock, the simulator with modelled replicas and a virtual one.

Snapshots go straight to `fleet.index`.
`tick` is to be called whenever `tick_period_s` has passed; everything else when it happens. Times are one monotonic clock; one
that steps back stands still instead, until it has caught up.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica.contract.messages import Bounce, BounceReason, Frame, Welcome
from router.config import RouterConfig
from router.dispatch import Bounds, Departure
from router.effects import Effect, Notice, WantSnapshot
from router.policy.fleet import Fleet
from router.policy.foresight import Happening
from router.policy.health import STALL_MIN_S
from router.policy.incarnation import Incarnation
from router.policy.known import Known
from router.policy.steady_clock import SteadyClock
from router.ports import Batch
from router.reception import Queued, Reception, Refused
from router.traffic import Traffic, batch_view

_QUEUE_TICK_S = 0.025
_IDLE_TICK_S = 0.25


class Switchboard:
    def __init__(self, config: RouterConfig, *, seed: int, now: float) -> None:
        self.fleet = Fleet(
            prefix_index_bytes_max=config.prefix_index_bytes_max,
            admission_quantile=config.admission_quantile,
            seed=seed,
            now=now,
        )
        self.reception = Reception(config, self.fleet, seed)
        self.traffic = Traffic(self.fleet, self.reception, Bounds())
        self._drain_timeout_s = config.drain_timeout_s
        self._event = Happening(self.reception.foresight, SteadyClock(now, self.fleet.lies))
        self._unserved_s: float | None = None  # since when there is work and nobody to do it

    # --- clients -----------------------------------------------------------------------------------------------------

    def arrive(self, batch: Batch, now: float) -> tuple[int, list[Effect]]:
        """A client request; returns its number here."""
        now = self._event(now)
        dispatch = self.traffic.open(batch)
        answer = self.reception.arrive(dispatch.batch_id, batch, batch_view(batch), now)
        if isinstance(answer, Queued):
            return dispatch.batch_id, [effect for one in answer.displaced for effect in self.traffic.answered(one, now)]
        if isinstance(answer, Refused) and answer.refusal.status == 503:
            self._unserved(now)
        return dispatch.batch_id, self.traffic.answered(answer, now)

    def stop(self, batch_id: int, index: int, now: float) -> list[Effect]:
        """The client needs no more of one choice."""
        now = self._event(now)
        dispatch = self.traffic.dispatches.get(batch_id)
        return self.traffic.settle(dispatch.stop(index), now) if dispatch is not None else []

    def close(self, batch_id: int, now: float) -> list[Effect]:
        """Cancel by the client; idempotent."""
        now = self._event(now)
        dispatch = self.traffic.dispatches.get(batch_id)
        return self.traffic.settle(dispatch.close(), now) if dispatch is not None else []

    # --- replicas ----------------------------------------------------------------------------------------------------

    def connected(self, welcome: Welcome, now: float) -> tuple[Incarnation | None, list[Effect]]:
        """None: another pool's, not to be used."""
        now = self._event(now)
        effects = self.lost(welcome.replica_id, now)
        incarnation = self.fleet.connect(welcome, now)
        if incarnation is None:
            return None, effects
        return incarnation, [*effects, WantSnapshot(incarnation), *self._freshened(incarnation, now)]

    def frame(self, incarnation: Incarnation, frame: Frame, now: float) -> list[Effect]:
        now = self._event(now)
        known = self.fleet.get(incarnation)
        news = self.fleet.frame(incarnation, frame, now)
        if known is None or news is None:
            return []
        effects: list[Effect] = [WantSnapshot(incarnation)] if news.want_snapshot else []
        if news.returned:
            effects.append(Notice("replica makes progress again", incarnation.replica_id, 0))
        for attempt in frame.accepted:
            effects += self.traffic.accepted(incarnation, attempt, now)
        for bounce in frame.bounces:
            effects += self.traffic.bounced(incarnation, bounce, now)
        effects += self.traffic.deltas(known, frame.deltas, now)
        return effects + self._freshened(incarnation, now)

    def undelivered(self, incarnation: Incarnation, attempt: int, now: float) -> list[Effect]:
        """The link could not take it: as if the replica had said that its queue is full."""
        now = self._event(now)
        return self.traffic.bounced(incarnation, Bounce(attempt, BounceReason.QUEUE_FULL), now)

    def lost(self, replica_id: str, now: float) -> list[Effect]:
        """Its link is gone."""
        now = self._event(now)
        incarnation = self.fleet.lose(replica_id, now)
        if incarnation is None:
            return []
        effects: list[Effect] = [Notice("replica lost", replica_id, self.traffic.streams_on(incarnation))]
        effects += self.traffic.depart_all(incarnation, Departure.LOST, now)
        if self.traffic.adrift:
            self._unserved(now)
        return effects + self.traffic.place_adrift(now)

    def leave(self, replica_id: str, leaving: bool, now: float) -> None:
        """Membership let it go: no new work; its streams run on until its link closes or the drain's time is up. False: it is back."""
        now = self._event(now)
        self.fleet.leave(replica_id, leaving, now)

    # --- time --------------------------------------------------------------------------------------------------------

    @property
    def tick_period_s(self) -> float:
        return _QUEUE_TICK_S if len(self.reception.queue) else _IDLE_TICK_S

    def tick(self, now: float) -> list[Effect]:
        now = self._event(now)
        effects: list[Effect] = []
        stalled, pause_s = self.fleet.check(now)
        self.reception.tenants.routers = self.fleet.routers
        for incarnation in stalled:
            effects.append(Notice("replica stalled", incarnation.replica_id, self.traffic.streams_on(incarnation)))
            effects += self.traffic.depart_all(incarnation, Departure.STALLED, now)
            if self.traffic.adrift:
                self._unserved(now - STALL_MIN_S)
        for known in self.fleet.all():
            if self._drain_is_over(known, now):
                effects.append(Notice("drain is over", known.view.incarnation.replica_id, known.view.own))
                effects += self.traffic.depart_all(known.view.incarnation, Departure.LEAVING, now)
        effects += self.traffic.place_adrift(now)
        effects += self.traffic.give_up_adrift(now, pause_s)
        for refused in self.reception.sweep(now):
            effects += self.traffic.answered(refused, now)
        return effects + self._serve_queue(self.fleet.routable(), now)

    def is_live(self, now: float) -> bool:
        """False: there has been work, and for the stall limit no replica to do it."""
        if self._unserved_s is not None and self.fleet.routable():
            self._unserved_s = None
        return self._unserved_s is None or now - self._unserved_s < STALL_MIN_S

    # --- within ------------------------------------------------------------------------------------------------------

    def _unserved(self, now: float) -> None:
        if not self.fleet.routable() and self._unserved_s is None and self.fleet.seen:
            self._unserved_s = now

    def _drain_is_over(self, known: Known, now: float) -> bool:
        """Its time is up, and there is somewhere else to go."""
        since_s = known.view.draining_since_s
        if since_s is None or not known.view.own or now - since_s < self._drain_timeout_s:
            return False
        return any(other.view.fingerprint == known.view.fingerprint for other in self.fleet.routable())

    def _freshened(self, incarnation: Incarnation, now: float) -> list[Effect]:
        """A replica's state is new: who waits for one is served."""
        effects = self.traffic.place_adrift(now)
        known = self.fleet.get(incarnation)
        if known is not None and known.is_in(self.fleet.pool()):
            self._unserved_s = None
            effects += self._serve_queue((known,), now)
        return effects

    def _serve_queue(self, candidates: Sequence[Known], now: float) -> list[Effect]:
        effects: list[Effect] = []
        while candidates and (admitted := self.reception.head(candidates, now)) is not None:
            effects += self.traffic.answered(admitted, now)
        return effects
