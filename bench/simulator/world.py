"""Routers and replicas under one virtual clock. Same requests, same faults, same seed: the same events in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from bench.simulator.agenda import Agenda
from bench.simulator.fault import Fault, FaultKind
from bench.simulator.journey import Journey
from bench.simulator.link import SimulatedLink
from bench.simulator.simulated_replica import SimulatedReplica
from bench.simulator.site import Site
from bench.simulator.slo import Slo
from bench.simulator.station import Station
from bench.simulator.trace import TraceRequest
from replica.contract.messages import Frame
from router.config import RouterConfig

START_S = 0.1  # connections and snapshots come before the first request
_LOSS_TOLD_S = 0.005  # from a death to the end of its links at the routers
_RELICS_MAX = 8


@dataclass(frozen=True, slots=True)
class Layout:
    replicas: int = 4
    routers: int = 1
    delay_s: float = 0.001  # of the link, each way
    seed: int = 0
    keeps_tokens: bool = False
    asks: Slo | None = None  # what clients ask for in their headers


class World:
    """`make(index, epoch)` is a replica. `run` until every request has ended, or `limit_s` after the last arrival."""

    def __init__(self, config: RouterConfig, layout: Layout, make: Callable[[int, int], SimulatedReplica]) -> None:
        self.agenda = Agenda()
        self.journeys: list[Journey] = []
        self.ended = 0
        self._layout = layout
        self._random = Random(layout.seed)
        self._relics: list[tuple[int, SimulatedLink, Frame]] = []
        self.sites = [
            Site(i, self.agenda, config, self._has_ended, seed=layout.seed * 1_000 + i, delay_s=layout.delay_s)
            for i in range(layout.routers)
        ]
        self.stations = [Station(self.agenda, f"r{i}", _made(make, i), self._deliver) for i in range(layout.replicas)]
        for station in self.stations:
            self._start(station)

    def run(self, requests: Sequence[TraceRequest], faults: Sequence[Fault] = (), *, limit_s: float = 3600.0) -> None:
        for fault in faults:
            self.agenda.at(START_S + fault.at_s, self._strike, fault)
        for at, request in enumerate(requests):
            journey = Journey(at, replace(request, arrival_s=START_S + request.arrival_s), at % len(self.sites))
            journey.tokens = [] if self._layout.keeps_tokens else None
            self.journeys.append(journey)
        self._expect(0)
        last_s = self.journeys[-1].request.arrival_s if self.journeys else 0.0
        while self.ended < len(self.journeys) and self.agenda.next(last_s + limit_s):
            pass
        for station in self.stations:
            station.note()

    def settle(self, seconds: float) -> None:
        """Let what is still under way come to rest."""
        until_s = self.agenda.now + seconds
        while self.agenda.next(until_s):
            pass

    # --- requests ----------------------------------------------------------------------------------------------------

    def _expect(self, number: int) -> None:
        if number < len(self.journeys):
            self.agenda.at(self.journeys[number].request.arrival_s, self._arrive, number)

    def _arrive(self, number: int) -> None:
        journey = self.journeys[number]
        self._expect(number + 1)
        self.sites[journey.router].arrive(journey, self._layout.asks)

    def _has_ended(self, journey: Journey) -> None:
        self.ended += 1

    def _deliver(self, router: int, link: SimulatedLink, frame: Frame) -> None:
        self.sites[router].hear(link, frame)

    # --- replicas ----------------------------------------------------------------------------------------------------

    def _start(self, station: Station) -> None:
        if not station.is_alive:
            station.start()
            for site in self.sites:
                site.connect(station)

    def _die(self, station: Station) -> None:
        if not station.is_alive:
            return
        for router, link in station.links.items():
            if link.last_frame is not None:
                self._relics.append((router, link, link.last_frame))
        del self._relics[:-_RELICS_MAX]
        lost = [self.sites[router] for router in station.links]
        station.die()
        for site in lost:
            self.agenda.at(self.agenda.now + _LOSS_TOLD_S, site.lost, station.name, station.epoch)

    def _reconnect(self, site: Site, station: Station) -> None:
        if station.is_alive and site.number not in station.links:
            site.connect(station)

    # --- faults ------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        station = self.stations[fault.replica % len(self.stations)]
        site = self.sites[fault.router % len(self.sites)]
        over_s = self.agenda.now + fault.lasts_s
        if fault.kind is FaultKind.DIE:
            self._die(station)
            self.agenda.at(over_s, self._start, station)
        elif fault.kind is FaultKind.HANG:
            station.is_hung = True
            self.agenda.at(over_s, station.wake)
        elif fault.kind is FaultKind.SLOW:
            station.replica.slowness = fault.amount
            self.agenda.at(over_s, _set_slowness, station.replica, 1.0)
        elif fault.kind is FaultKind.LATE:
            link = station.links.get(site.number)
            if link is not None:
                link.extra_s = fault.amount
                self.agenda.at(over_s, _set_lateness, link, 0.0)
        elif fault.kind is FaultKind.DISCONNECT:
            site.disconnect(station)
            self.agenda.at(over_s, self._reconnect, site, station)
        elif fault.kind is FaultKind.RELIC:
            self._haunt(site, station)
        elif fault.kind is FaultKind.JUMP:
            site.skew_s += fault.amount
        elif site.journeys:
            site.hang_up(self._random.choice(sorted(journey.number for journey in site.journeys.values())))

    def _haunt(self, site: Site, station: Station) -> None:
        """Frames of dead incarnations by old links and by the new one; of epochs to come; of a sequence long past."""
        link = station.links.get(site.number)
        for router, old, frame in self._relics:
            if router == site.number:
                site.hear(old, frame)
                if link is not None and frame.epoch != station.epoch:
                    site.hear(link, frame)
        if link is not None and link.last_frame is not None and link.is_open:
            bare = Frame(epoch=station.epoch, sequence=0, load=link.last_frame.load)
            site.hear(link, bare)
            site.hear(link, Frame(epoch=station.epoch + 7, sequence=3, load=bare.load, deltas=link.last_frame.deltas))


def _made(make: Callable[[int, int], SimulatedReplica], index: int) -> Callable[[int], SimulatedReplica]:
    return lambda epoch: make(index, epoch)


def _set_slowness(replica: SimulatedReplica, factor: float) -> None:
    replica.slowness = factor


def _set_lateness(link: SimulatedLink, seconds: float) -> None:
    link.extra_s = seconds
