"""How long to wait before a lost replica is tried again. Pure: the random number is an argument."""

from __future__ import annotations

FIRST_S = 0.05
LARGEST_S = 2.0


def reconnect_delay_s(failures: int, random: float) -> float:
    """Delay before the next try after `failures` ≥ 1 losses in a row; `random` in [0, 1) spreads routers over half of it."""
    ceiling_s = min(LARGEST_S, FIRST_S * 2.0 ** min(max(failures, 1) - 1, 16))
    return ceiling_s * (0.5 + 0.5 * random)
