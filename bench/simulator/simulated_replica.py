"""What the world needs of a replica, whether it is a cost model or the real engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from replica.contract.messages import Bounce, EngineLimits, GenerateRequest, KvEvent, LoadReport, TokenDelta


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step brought, or what there was to tell without one. Pairs are (owner, …); an owner is a router."""

    load: LoadReport
    deltas: tuple[tuple[int, TokenDelta], ...] = ()
    accepted: tuple[tuple[int, int], ...] = ()
    bounces: tuple[tuple[int, Bounce], ...] = ()
    events: tuple[KvEvent, ...] = ()


class SimulatedReplica(Protocol):
    """`begin` starts a step if there is work and none runs; `end` finishes it. Durations come from the truth, not from what it tells."""

    slowness: float  # factor on every step's duration; a fault changes it

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def is_stepping(self) -> bool: ...

    @property
    def holds(self) -> int:
        """Requests that run or wait here."""
        ...

    def submit(self, owner: int, request: GenerateRequest, now: float) -> None: ...

    def cancel(self, owner: int, attempt: int) -> None: ...

    def cancel_owner(self, owner: int) -> None: ...

    def begin(self, now: float) -> float | None:
        """How long the step that starts now takes, in seconds; None: nothing to do, or one runs."""
        ...

    def end(self, now: float) -> Turn: ...

    def beat(self, now: float) -> Turn:
        """What there is to say between steps."""
        ...

    def load(self) -> LoadReport: ...

    def snapshot(self) -> tuple[tuple[bytes, bytes], ...]: ...

    def check(self) -> None:
        """Every invariant, from scratch. Between steps only."""
        ...
