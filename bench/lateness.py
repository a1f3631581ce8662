"""Whether the client was in its own way: what it then measured is partly itself."""

from __future__ import annotations

from collections.abc import Mapping

LATE_MS = 20.0  # p99 of sending; below it a client is as punctual as a timer
LATE_SHARE = 0.1  # of the median time to first token
BUSY_CORES = 0.85  # of the one it has


def lateness(figures: Mapping[str, float | None]) -> str:
    """What the figures of one run say of the client, in words; empty when it kept up."""
    lag_ms, ttft_ms, cpu = (figures.get(name) for name in ("send_lag_p99_ms", "ttft_p50_ms", "client_cpu_cores"))
    late = lag_ms is not None and lag_ms > LATE_MS and lag_ms > LATE_SHARE * (ttft_ms or 0.0)
    seen = [f"the client sent up to {lag_ms:.0f} ms late (p99)"] if late else []
    seen += [f"the client used {cpu:.2f} of its one core"] if cpu is not None and cpu > BUSY_CORES else []
    return "; ".join(seen)
