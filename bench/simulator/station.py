"""One replica's place in the world: it starts, steps, speaks and dies here, whatever kind it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.simulator.agenda import Agenda
from bench.simulator.link import SimulatedLink
from bench.simulator.simulated_replica import SimulatedReplica, Turn
from replica.contract.messages import PROTOCOL_VERSION, Frame, GenerateRequest, Snapshot, Welcome

HEARTBEAT_S = 0.5
FINGERPRINT = "simulated"
MODEL = "simulated"


Deliver = Callable[[int, SimulatedLink, Frame], None]


class Station:
    """`make(epoch)` is a new incarnation; `deliver(router, link, frame)` is called when a frame has arrived at a router."""

    def __init__(self, agenda: Agenda, name: str, make: Callable[[int], SimulatedReplica], deliver: Deliver) -> None:
        self.name = name
        self.epoch = 0
        self.links: dict[int, SimulatedLink] = {}  # by router
        self.is_alive = False
        self.is_hung = False  # connected, and nothing happens any more
        self.held_s = 0.0  # request-seconds: its mean load times the time
        self._deliver = deliver
        self._noted_s = 0.0
        self._agenda = agenda
        self._make = make
        self._sequence = 0
        self._due_s = 0.0
        self.replica: SimulatedReplica = make(0)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new incarnation, with nothing of the old one."""
        self.note()
        self.epoch += 1
        self.replica = self._make(self.epoch)
        self.is_alive, self.is_hung, self._sequence = True, False, 0
        self._agenda.at(self._agenda.now + HEARTBEAT_S, self._beat, self.epoch)

    def die(self) -> None:
        self.note()
        self.is_alive = False
        for link in self.links.values():
            link.is_open = False
        self.links.clear()

    def wake(self) -> None:
        if not self.is_hung or not self.is_alive:
            return
        self.is_hung = False
        if self.replica.is_stepping:
            self._agenda.at(self._due_s, self._end, self.epoch, self._due_s)
        else:
            self._begin()

    def welcome(self) -> Welcome:
        return Welcome(
            protocol=PROTOCOL_VERSION,
            replica_id=self.name,
            epoch=self.epoch,
            model=MODEL,
            revision="",
            fingerprint=FINGERPRINT,
            limits=self.replica.limits,
            load=self.replica.load(),
        )

    # --- from routers ------------------------------------------------------------------------------------------------

    def submit(self, owner: int, request: GenerateRequest) -> None:
        self.note()
        self.replica.submit(owner, request, self._agenda.now)
        if not self.replica.is_stepping and not self.is_hung:
            self._agenda.at(self._agenda.now, self._wake_up, self.epoch)

    def cancel(self, owner: int, attempt: int) -> None:
        self.replica.cancel(owner, attempt)

    def snapshot(self, owner: int, take: Callable[[Snapshot], None]) -> None:
        link = self.links.get(owner)
        if link is not None:
            link.to_router(take, Snapshot(self.epoch, self._sequence, self.replica.snapshot()))

    # --- steps -------------------------------------------------------------------------------------------------------

    def _wake_up(self, epoch: int) -> None:
        if self._is(epoch) and not self.replica.is_stepping:
            self._begin()

    def _begin(self) -> None:
        took_s = self.replica.begin(self._agenda.now)
        if took_s is not None:
            self._due_s = self._agenda.now + took_s
            self._agenda.at(self._due_s, self._end, self.epoch, self._due_s)
        elif self.replica.holds == 0:
            turn = self.replica.beat(self._agenda.now)
            if turn.bounces or turn.accepted or turn.deltas or turn.events:
                self._speak(turn)

    def _end(self, epoch: int, due_s: float) -> None:
        if self._is(epoch) and self.replica.is_stepping and due_s == self._due_s:
            self.note()
            self._speak(self.replica.end(self._agenda.now))
            self._begin()

    def _beat(self, epoch: int) -> None:
        if epoch != self.epoch or not self.is_alive:
            return
        if not self.is_hung and not self.replica.is_stepping:
            self._speak(self.replica.beat(self._agenda.now))
            self._begin()
        self._agenda.at(self._agenda.now + HEARTBEAT_S, self._beat, epoch)

    def _is(self, epoch: int) -> bool:
        return epoch == self.epoch and self.is_alive and not self.is_hung

    def note(self) -> None:
        """Add up what it has held until now."""
        now = self._agenda.now
        if self.is_alive:
            self.held_s += self.replica.holds * (now - self._noted_s)
        self._noted_s = now

    # --- speech ------------------------------------------------------------------------------------------------------

    def _speak(self, turn: Turn) -> None:
        batches = 1 if turn.events else 0
        self._sequence += batches
        for owner, frame in self._frames(turn, batches):
            link = self.links[owner]
            link.last_frame = frame
            link.to_router(self._deliver, owner, link, frame)

    def _frames(self, turn: Turn, batches: int) -> Iterator[tuple[int, Frame]]:
        alone = len(self.links) == 1
        for owner in tuple(self.links):
            yield (
                owner,
                Frame(
                    epoch=self.epoch,
                    sequence=self._sequence,
                    load=turn.load,
                    deltas=tuple(delta for to, delta in turn.deltas if alone or to == owner),
                    accepted=tuple(attempt for to, attempt in turn.accepted if alone or to == owner),
                    bounces=tuple(bounce for to, bounce in turn.bounces if alone or to == owner),
                    events=turn.events,
                    batches=batches,
                    routers=len(self.links),
                ),
            )
