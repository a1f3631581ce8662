"""Who may fill a replica's queue how deep: tenants by weight, classes by what the tightest of them can bear (DESIGN §7).

What waits at a replica waits in its order, what waits at the router in ours. So whoever has had more than its share while
others are there, or has more time than the tightest class (by its own class or by a longer promise of its own) or than what
others have lately asked for, leaves the replicas' queues to the others and waits here. A replica is kept just busy by them: when
somebody else comes, its queue is short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from router.policy.classes import Classes, ServiceClass, Slo
from router.policy.of_late import LeastOfLate
from router.policy.shares import Shares


@dataclass(frozen=True, slots=True)
class Depth:
    """See router.policy.admission.Promise."""

    depth_s: float = math.inf
    is_lean: bool = False


ASKED_S = 10.0  # a promise counts for so long, and at most twice as long
_SAME = 1.05  # promises that differ by less are equal


_FREE = Depth()
_LEAN = Depth(is_lean=True)


class Standing:
    def __init__(self, classes: Classes, weight_of: Callable[[str], float]) -> None:
        self._classes = classes
        self._tenants = Shares(weight_of)
        self._by_class = Shares(lambda name: 1.0)
        self._tightest_s = min(one.slo.queue_time_s for one in classes)
        self._asked = LeastOfLate(ASKED_S)
        self._floors = tuple(one for one in classes if one.floor > 0)

    def seen(self, service: ServiceClass, tenant: str, now: float) -> None:
        """A request came, whatever becomes of it."""
        self._tenants.seen(tenant, now)
        self._by_class.seen(service.name, now)

    def charge(self, request_class: str, tenant: str, tokens: float, now: float) -> None:
        """Uncached tokens were admitted."""
        self._tenants.charge(tenant, tokens, now)
        self._by_class.charge(request_class, tokens, now)

    def exceeds(self, tenant: str, now: float) -> bool:
        return self._tenants.exceeds(tenant, now)

    def asks(self, slo: Slo, tokens: int, now: float) -> None:
        """Of a request that came: what it was promised itself, whether or not that can be kept."""
        self._asked.see(slo.time_s(tokens), now)

    def depth(self, service: ServiceClass, slo: Slo, tokens: int, tenant: str, now: float) -> Depth:
        """Of one request of so many tokens: `slo` is what it was promised itself."""
        if self.exceeds(tenant, now):
            return _LEAN
        if self._classes.patience_s(service.name, slo) <= self._tightest_s:
            return _LEAN if slo.time_s(tokens) > _SAME * self._asked.least(now) else _FREE
        return Depth(self._tightest_s) if self._is_behind(service, now) else _LEAN

    def behind(self, now: float) -> tuple[str, ...]:
        """Classes that have had less than their floor, the most deprived first."""
        if not self._floors or len(self._by_class) < 2:
            return ()
        found = [one for one in self._floors if self._is_behind(one, now)]
        return tuple(one.name for one in sorted(found, key=lambda one: self._by_class.fraction(one.name, now) / one.floor))

    def _is_behind(self, service: ServiceClass, now: float) -> bool:
        return self._by_class.fraction(service.name, now) < service.floor
