"""The link between one router and one replica under the virtual clock: in order, late by a delay, lost as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.simulator.agenda import Agenda
from replica.contract.messages import Frame
from router.policy.incarnation import Incarnation


@dataclass(slots=True)
class SimulatedLink:
    """Of one connection: what is under way when it is lost never arrives."""

    agenda: Agenda
    incarnation: Incarnation
    delay_s: float
    is_open: bool = True
    extra_s: float = 0.0  # a fault makes frames late
    _to_router_s: float = 0.0
    _to_replica_s: float = 0.0
    last_frame: Frame | None = field(default=None)

    def to_router(self, what: Callable[..., object], *arguments: object) -> None:
        self._to_router_s = max(self._to_router_s, self.agenda.now + self.delay_s + self.extra_s)
        self.agenda.at(self._to_router_s, self._arrive, what, arguments)

    def to_replica(self, what: Callable[..., object], *arguments: object) -> None:
        self._to_replica_s = max(self._to_replica_s, self.agenda.now + self.delay_s)
        self.agenda.at(self._to_replica_s, self._arrive, what, arguments)

    def _arrive(self, what: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if self.is_open:
            what(*arguments)
