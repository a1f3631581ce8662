"""Whether a rate was offered for long enough to say that it can be borne, and not only begun."""

from __future__ import annotations

import math

from bench.analysis.at_load import AtLoad

ANSWERS_LONG = 2.0  # the time in which requests become due, in times to the end of an answer (p95)


def unsteadiness(point: AtLoad) -> str:
    """Why the load says little of the same rate for hours, in words; empty when it was steady, or no rate.

    Where the last request is due before the first answers have ended, the server never ran as many at a time as the
    rate leads to: any server keeps its targets for that long.
    """
    answer_ms = point.median("e2e_p95_ms")
    if point.requests is None or point.is_burst or not point.offered_per_s or answer_ms is None:
        return ""
    answer_s, due_s = answer_ms / 1e3, (point.requests - 1) / point.offered_per_s
    if due_s >= ANSWERS_LONG * answer_s:
        return ""
    needed = math.ceil(ANSWERS_LONG * answer_s * point.offered_per_s) + 1
    return (
        f"not a steady load: its requests were due within {due_s:.2g} s, and an answer takes up to {answer_s:.2g} s (p95);"
        f" {_rounded_up(needed)} requests or more would tell (--requests)"
    )


def _rounded_up(count: int) -> int:
    """To the next ten."""
    return -(-count // 10) * 10
