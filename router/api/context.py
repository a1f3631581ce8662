"""What every endpoint works with: one per app, made by build_app."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from replica.contract.messages import EngineLimits
from router.api.intake import Intake
from router.api.metrics import Metrics
from router.api.text_pool import TextPool
from router.api.tracing import Tracing
from router.config import RouterConfig
from router.policy.classes import Classes
from router.ports import Backend
from router.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Context:
    backend: Backend
    model: ServedModel
    config: RouterConfig
    metrics: Metrics
    tracing: Tracing
    pool: TextPool
    intake: Intake
    classes: Classes
    clock: Callable[[], float] = time.monotonic  # seconds
    # Seeds and ids, from a generator of our own: the system's lets other threads run meanwhile, and waits for them.
    random_bits: Callable[[int], int] = field(default_factory=lambda: Random(secrets.randbits(256)).getrandbits)

    def limits(self) -> EngineLimits | None:
        """Of the pool; None while no replica has been seen."""
        return self.backend.facts().limits
