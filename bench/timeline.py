"""How the server looked during a run: samples of /metrics and /proc, as columns of equal length."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLES_MAX = 600


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds since the first request was due; None in a column: the server does not say. Counts are since the start of the run."""

    time_s: tuple[float, ...] = ()
    running: tuple[float | None, ...] = ()
    waiting: tuple[float | None, ...] = ()
    kv_use_percent: tuple[float | None, ...] = ()
    queue_ms: tuple[float | None, ...] = ()  # mean of the requests that started since the sample before; None: none did
    shed: tuple[float | None, ...] = ()
    preemptions: tuple[float | None, ...] = ()
    memory_mib: tuple[float | None, ...] = ()
