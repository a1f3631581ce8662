"""Tenants: their weights, and what each has in flight here against its limits. Limits are of the cluster, so each router has its part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.policy.request_view import RequestView


@dataclass(frozen=True, slots=True)
class Tenant:
    weight: float = 1.0
    requests_max: int | None = None
    tokens_max: int | None = None


_ANYONE = Tenant()


@dataclass(slots=True)
class _Held:
    batches: dict[int, RequestView] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0


class Tenants:
    """Two doors, by batch: `enter`, and `leave`, which is idempotent. Only tenants with limits are kept."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = dict(tenants)
        self._held: dict[str, _Held] = {}
        self._tenant_of: dict[int, str] = {}
        self.routers = 1  # live ones

    def weight(self, tenant: str) -> float:
        return self._tenants.get(tenant, _ANYONE).weight

    def limit(self, tenant: str, view: RequestView) -> str | None:
        """Which limit the batch would exceed. A single one always has room where nothing else of its tenant is in flight."""
        limits = self._tenants.get(tenant)
        held = self._held.get(tenant)
        if limits is None or held is None:
            return None
        if limits.requests_max is not None and held.requests + view.choices > self._part(limits.requests_max):
            return f"requests_max of {limits.requests_max}"
        if limits.tokens_max is not None and held.tokens + view.all_tokens > self._part(limits.tokens_max):
            return f"tokens_max of {limits.tokens_max}"
        return None

    def enter(self, batch_id: int, view: RequestView) -> None:
        limits = self._tenants.get(view.tenant)
        if limits is None or (limits.requests_max is None and limits.tokens_max is None):
            return
        held = self._held.setdefault(view.tenant, _Held())
        held.batches[batch_id] = view
        held.requests += view.choices
        held.tokens += view.all_tokens
        self._tenant_of[batch_id] = view.tenant

    def leave(self, batch_id: int) -> None:
        tenant = self._tenant_of.pop(batch_id, None)
        if tenant is None:
            return
        held = self._held[tenant]
        view = held.batches.pop(batch_id)
        held.requests -= view.choices
        held.tokens -= view.all_tokens
        if not held.batches:
            del self._held[tenant]

    def __len__(self) -> int:
        """Batches of tenants with limits that are in flight."""
        return len(self._tenant_of)

    def _part(self, limit: int) -> int:
        return math.ceil(limit / max(1, self.routers))
