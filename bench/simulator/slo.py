"""What a request must keep to be good; where admission is on, what its client asks for."""

from __future__ import annotations

from dataclasses import dataclass

from bench.simulator.journey import Journey


@dataclass(frozen=True, slots=True)
class Slo:
    """Time to first token: base + per prompt token, cached or not; time per output token."""

    ttft_s: float = 4.0
    ttft_per_token_s: float = 0.0
    tpot_s: float = 0.1

    def ttft_within_s(self, prompt_tokens: int) -> float:
        return self.ttft_s + self.ttft_per_token_s * prompt_tokens

    def is_met(self, journey: Journey) -> bool:
        ttft_s, tpot_s = journey.ttft_s, journey.tpot_s
        if ttft_s is None or not journey.is_complete:
            return False
        return ttft_s <= self.ttft_within_s(journey.request.prompt_tokens) and (tpot_s or 0.0) <= self.tpot_s
