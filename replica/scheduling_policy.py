"""What an operator may set about scheduling, and the constants that are not theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replica.config import Batching, EngineConfig
from replica.request import Request
from replica.waiting_queue import by_arrival

BYPASSES_MAX = 32  # times a waiting request is passed, and steps a partly computed one stands still, before nothing passes it any more
SHARED_WAITS_MAX = 32  # steps a request stands back for a block that another is writing


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    batching: Batching
    whole_prompts: bool  # no chunks: a prompt is computed in one step
    by_priority: bool
    partial_prefills_max: int
    chunk_tokens_max: int | None
    inter_token_slo_s: float
    bypasses_max: int = BYPASSES_MAX
    shared_waits_max: int = SHARED_WAITS_MAX
    rank: Callable[[Request], int] = by_arrival

    def is_overdue(self, request: Request) -> bool:
        """Partly computed, and without a chunk for so many steps that now it goes before whoever is more urgent."""
        return request.history.left_out >= self.bypasses_max

    @classmethod
    def of(cls, config: EngineConfig) -> SchedulingPolicy:
        return cls(
            batching=config.batching,
            whole_prompts=not config.enable_chunked_prefill,
            by_priority=config.scheduling_policy == "priority",
            partial_prefills_max=config.max_num_partial_prefills,
            chunk_tokens_max=config.long_prefill_token_threshold or None,
            inter_token_slo_s=config.inter_token_slo_ms / 1000,
        )
