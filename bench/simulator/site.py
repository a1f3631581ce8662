"""One router in the world: the production switchboard, its clock, its clients, its links."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.simulator.agenda import Agenda
from bench.simulator.journey import COVERED, Journey, Promise
from bench.simulator.link import SimulatedLink
from bench.simulator.slo import Slo
from bench.simulator.station import Station
from replica.contract.messages import Frame, GenerateRequest, SamplingParams, Snapshot
from router.config import RouterConfig
from router.effects import CancelAttempt, Effect, Emit, Ended, Notice, Reject, Submit, WantSnapshot
from router.ports import Batch
from router.switchboard import Switchboard


class Site:
    """`skew_s` is what its clock has jumped; the switchboard sees no other time than `clock()`."""

    def __init__(
        self, number: int, agenda: Agenda, config: RouterConfig, on_end: Callable[[Journey], None], *, seed: int, delay_s: float
    ) -> None:
        self.number = number
        self.board = Switchboard(config, seed=seed, now=agenda.now)
        self.journeys: dict[int, Journey] = {}  # by batch, those in flight
        self.notices: list[Notice] = []
        self.skew_s = 0.0
        self.queue_depth_max = 0
        self._on_end = on_end
        self._agenda = agenda
        self._delay_s = delay_s
        self._stations: dict[str, Station] = {}
        agenda.at(agenda.now, self._tick)

    def clock(self) -> float:
        return self._agenda.now + self.skew_s

    # --- replicas ----------------------------------------------------------------------------------------------------

    def connect(self, station: Station) -> None:
        """A new link to a replica that is up."""
        self._stations[station.name] = station
        incarnation, effects = self.board.connected(station.welcome(), self.clock())
        assert incarnation is not None, "there is one pool"
        station.links[self.number] = SimulatedLink(self._agenda, incarnation, self._delay_s)
        self._carry_out(effects)

    def disconnect(self, station: Station) -> None:
        """The link is gone: what was under way is lost, and the replica lets go of this router's work."""
        link = station.links.pop(self.number, None)
        if link is not None:
            link.is_open = False
            station.replica.cancel_owner(self.number)
            self._carry_out(self.board.lost(station.name, self.clock()))

    def lost(self, replica_id: str, epoch: int) -> None:
        """The replica died; its end of the link is gone already."""
        if any(one.view.incarnation == (replica_id, epoch) for one in self.board.fleet.all()):
            self._carry_out(self.board.lost(replica_id, self.clock()))

    def hear(self, link: SimulatedLink, frame: Frame) -> None:
        """A frame, wherever it comes from: a fault may bring one of another life."""
        self._carry_out(self.board.frame(link.incarnation, frame, self.clock()))

    # --- clients -----------------------------------------------------------------------------------------------------

    def arrive(self, journey: Journey, asks: Slo | None = None) -> None:
        one = journey.request
        request = GenerateRequest(
            attempt=0,
            request_id=str(journey.number),
            choice=0,
            prompt_ids=one.prompt_ids or (0,) * one.prompt_tokens,
            block_keys=one.keys,
            sampling=SamplingParams(seed=journey.number, max_tokens=one.output_tokens, ignore_eos=True),
        )
        now = self.clock()
        within_s = None if asks is None else asks.ttft_within_s(one.prompt_tokens)
        batch = Batch(request.request_id, (request,), now, within_s, within_s, None if asks is None else asks.tpot_s)
        batch_id, effects = self.board.arrive(batch, now)
        self.journeys[batch_id] = journey
        self.queue_depth_max = max(self.queue_depth_max, self.board.reception.queue.depth)
        self._carry_out(effects)

    def hang_up(self, number: int) -> None:
        """The client of a journey goes away."""
        for batch_id, journey in self.journeys.items():
            if journey.number == number:
                journey.is_cancelled = True
                self._carry_out(self.board.close(batch_id, self.clock()))
                return

    # --- within ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._carry_out(self.board.tick(self.clock()))
        self._agenda.at(self._agenda.now + self.board.tick_period_s, self._tick)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.journeys[effect.batch_id].hear(effect.delta, self._agenda.now)
            elif isinstance(effect, Submit):
                self._submit(effect)
            elif isinstance(effect, CancelAttempt):
                station = self._stations[effect.incarnation.replica_id]
                link = station.links.get(self.number)
                if link is not None and link.incarnation == effect.incarnation:
                    link.to_replica(station.cancel, self.number, effect.attempt)
            elif isinstance(effect, WantSnapshot):
                self._want_snapshot(effect)
            elif isinstance(effect, Reject):
                self.journeys[effect.batch_id].rejected = (effect.status, effect.reason)
            elif isinstance(effect, Notice):
                self.notices.append(effect)
            elif isinstance(effect, Ended):
                journey = self.journeys.pop(effect.batch_id)
                journey.ended_s = self._agenda.now
                journey.ends += 1
                self._on_end(journey)

    def _submit(self, effect: Submit) -> None:
        station = self._stations[effect.incarnation.replica_id]
        link = station.links.get(self.number)
        if link is None or link.incarnation != effect.incarnation:
            return  # its loss is being told
        self._note_promise(effect)
        link.to_replica(station.submit, self.number, effect.request)

    def _note_promise(self, effect: Submit) -> None:
        known = self.board.fleet.get(effect.incarnation)
        held = self.board.traffic.attempts.get(effect.request.attempt)
        lease = None if known is None else known.view.pending.get(effect.request.attempt)
        if known is None or held is None or lease is None:
            return  # it has gone already
        journey = self.journeys[held[0].batch_id]
        now = self.clock()
        calibration = known.calibrations.ttft(lease.new_tokens)
        quantiles = tuple(calibration.quantile_s(lease.predicted_ttft_s, lease.grain_s, q, now) for q in COVERED)
        journey.replica = effect.incarnation.replica_id
        journey.promise = Promise(lease.new_tokens, self._agenda.now, quantiles, lease.predicted_ttft_s)

    def _want_snapshot(self, effect: WantSnapshot) -> None:
        station = self._stations[effect.incarnation.replica_id]
        link = station.links.get(self.number)
        if link is not None and link.incarnation == effect.incarnation:

            def take(snapshot: Snapshot) -> None:
                self.board.fleet.index.snapshot(effect.incarnation, snapshot)

            link.to_replica(station.snapshot, self.number, take)
