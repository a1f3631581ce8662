"""How long a measurement takes at least, by its arrivals alone: said before it starts, and refused where nobody can mean it."""

from __future__ import annotations

import math

from bench.positive import check_positive

HOURS_MAX = 4.0  # unless asked for more


def check_hours(expected_s: float, hours_max: float) -> None:
    """Raises ValueError where the requests become due over more than `hours_max`."""
    check_positive(max_hours=hours_max)
    if expected_s > 3600 * hours_max:
        raise ValueError(
            f"the requests become due over {spoken(expected_s)} in all: more than {hours_max:g} h are measured only with --max-hours"
        )


def spoken(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `1 h 5 min`, `2 days 3 h`; in words where it has no end."""
    if not math.isfinite(seconds):
        return "more time than there is"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days {whole % 86400 // 3600} h"
