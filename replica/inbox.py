"""What routers ask of an engine, on its way from the event loop's thread to the engine's: bounded, and free of races.

A cancel meets its request wherever that is: still here (withdrawn, the engine never sees it) or already in the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from replica.contract.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class Cancels:
    """`attempts` as (owner, attempt), then whole owners, in the order they were asked for."""

    attempts: tuple[tuple[int, int], ...] = ()
    owners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Commands:
    cancels: Cancels
    submits: tuple[tuple[int, GenerateRequest, float], ...]  # (owner, request, when it came)
    snapshots: tuple[int, ...]  # owners that want one

    @property
    def is_empty(self) -> bool:
        return not (self.cancels.attempts or self.cancels.owners or self.submits or self.snapshots)


class Inbox:
    """Safe to use from any thread. `condition` guards everything and is notified when something arrives."""

    def __init__(self, *, submits_max: int, cancels_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the engine's."""
        self.condition = threading.Condition()
        self._submits_max = submits_max
        self._cancels_max = cancels_max
        self._clock = clock
        self._submits: dict[tuple[int, int], tuple[GenerateRequest, float]] = {}
        self._cancels: dict[tuple[int, int], None] = {}
        self._owners: dict[int, None] = {}
        self._snapshots: dict[int, None] = {}

    def submit(self, owner: int, request: GenerateRequest) -> bool:
        """False: full, the request was not taken."""
        with self.condition:
            if len(self._submits) >= self._submits_max:
                return False
            self._submits[owner, request.attempt] = (request, self._clock())
            self.condition.notify()
            return True

    def cancel(self, owner: int, attempt: int) -> bool:
        """False: full (a caller that only cancels live attempts never sees it)."""
        with self.condition:
            self._submits.pop((owner, attempt), None)
            if len(self._cancels) >= self._cancels_max and (owner, attempt) not in self._cancels:
                return False
            self._cancels[owner, attempt] = None
            self.condition.notify()
            return True

    def cancel_owner(self, owner: int) -> None:
        with self.condition:
            for key in [key for key in self._submits if key[0] == owner]:
                del self._submits[key]
            for key in [key for key in self._cancels if key[0] == owner]:
                del self._cancels[key]
            self._snapshots.pop(owner, None)
            self._owners[owner] = None
            self.condition.notify()

    def want_snapshot(self, owner: int) -> None:
        with self.condition:
            self._snapshots[owner] = None
            self.condition.notify()

    def has_any(self) -> bool:
        """Call with `condition` held, or as a hint."""
        return bool(self._submits or self._cancels or self._owners or self._snapshots)

    def take(self) -> Commands:
        with self.condition:
            submits = tuple((owner, request, came_s) for (owner, _), (request, came_s) in self._submits.items())
            snapshots = tuple(self._snapshots)
            self._submits.clear()
            self._snapshots.clear()
            return Commands(self._take_cancels(), submits, snapshots)

    def take_cancels(self) -> Cancels:
        """Only the cancels: all of them are of requests the engine has, or that were withdrawn."""
        with self.condition:
            return self._take_cancels()

    def _take_cancels(self) -> Cancels:
        cancels = Cancels(tuple(self._cancels), tuple(self._owners))
        self._cancels.clear()
        self._owners.clear()
        return cancels
