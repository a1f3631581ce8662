"""One connected replica: what it says, how it is, and how far it has been predicted right."""

from __future__ import annotations

from dataclasses import dataclass

from router.policy.calibration import Calibrations
from router.policy.forecast import full_step_s
from router.policy.health import Health, Pulse
from router.policy.load import ReplicaView


@dataclass(slots=True)
class Known:
    """`order`: in which they connected."""

    view: ReplicaView
    health: Health
    calibrations: Calibrations
    order: int
    routers: int = 1  # connected to it, as it says

    @property
    def is_routable(self) -> bool:
        """If it is of the present pool."""
        return self.health.pulse is Pulse.BEATING and self.view.draining_since_s is None

    def is_in(self, pool: ReplicaView | None) -> bool:
        """Routable among the replicas like `pool`."""
        return pool is not None and self.is_routable and self.view.fingerprint == pool.fingerprint

    def expect(self, output_tokens: float, now: float) -> None:
        """To be called before its health is asked for: with every frame it would be the dearest part of one."""
        self.health.expect(full_step_s(self.view, output_tokens, now))
