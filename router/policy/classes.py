"""Classes of service and what they promise (DESIGN §7). A header may replace a class's promise for one request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

STANDARD = "standard"  # always there; whoever names no class is of it
TIERS: Mapping[str, str] = {  # OpenAI's names for a service tier, where no class of that name is configured
    "auto": STANDARD,
    "default": STANDARD,
    "priority": "interactive",
    "scale": "interactive",
    "flex": "batch",
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds. Times to the first token are from the arrival at the router; None promises nothing."""

    queue_time_s: float
    ttft_s: float | None = None
    ttft_per_token_s: float = 0.0  # added to it, per prompt token that no cache holds
    tpot_s: float | None = None

    def ttft_within_s(self, new_tokens: int) -> float:
        return math.inf if self.ttft_s is None else self.ttft_s + self.ttft_per_token_s * new_tokens

    def time_s(self, new_tokens: int) -> float:
        """All that it leaves: whichever of its promises is due first."""
        return self.queue_time_s if self.ttft_s is None else min(self.queue_time_s, self.ttft_within_s(new_tokens))


@dataclass(frozen=True, slots=True)
class ServiceClass:
    name: str
    slo: Slo
    floor: float = 0.0  # part of what is admitted that it gets while it has work waiting


class Terms(msgspec.Struct, frozen=True):
    """Who asks, and for what: all that admission knows of a request before its text is read."""

    request_class: str = STANDARD
    tenant: str = ""
    queue_time_slo_s: float | None = None  # None: the class's
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


class Classes:
    """The table of one router. Unknown names are None, never another class."""

    def __init__(self, classes: Sequence[ServiceClass]) -> None:
        self._by_name = {one.name: one for one in classes}
        assert STANDARD in self._by_name, "whoever names no class is of this one"

    def __getitem__(self, name: str) -> ServiceClass:
        return self._by_name[name]

    def __iter__(self) -> Iterator[ServiceClass]:
        return iter(self._by_name.values())

    def find(self, name: str) -> ServiceClass | None:
        return self._by_name.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def asked(self, name: str | None) -> str | None:
        """The class that a header or `service_tier` means; None: there is no such class."""
        if not name:
            return STANDARD
        if name in self._by_name:
            return name
        tier = TIERS.get(name)
        return None if tier is None else tier if tier in self._by_name else STANDARD

    def patience_s(self, name: str, slo: Slo) -> float:
        """How long one of the class `name`, promised `slo`, can stand back for others: a promise of its own never shortens it."""
        return max(self._by_name[name].slo.queue_time_s, slo.queue_time_s)

    def slo(self, terms: Terms) -> Slo:
        """`terms.request_class` is one of ours."""
        slo = self._by_name[terms.request_class].slo
        if terms.queue_time_slo_s is not None:
            slo = replace(slo, queue_time_s=terms.queue_time_slo_s)
        if terms.ttft_slo_s is not None:
            slo = replace(slo, ttft_s=terms.ttft_slo_s, ttft_per_token_s=0.0)
        if terms.tpot_slo_s is not None:
            slo = replace(slo, tpot_s=terms.tpot_slo_s)
        return slo
