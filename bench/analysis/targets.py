"""Whether one load kept its targets, and what broke if it did not."""

from __future__ import annotations

from dataclasses import fields

from bench.analysis.at_load import AtLoad
from bench.slo import Slo

# The figure whose p95 is held against a target of the SLO.
FIGURE_OF = {
    "ttft_ms": "ttft_p95_ms",
    "itl_p95_ms": "itl_p95_ms",
    "tpot_ms": "tpot_p95_ms",
    "e2e_ms": "e2e_p95_ms",
    "queue_ms": "queue_p95_ms",
}
NAMES = {"ttft_ms": "TTFT", "itl_p95_ms": "inter-token", "tpot_ms": "time per token", "e2e_ms": "end to end", "queue_ms": "queue time"}
REFUSED_PERCENT = 1.0  # fewer are not worth naming


def broken_targets(point: AtLoad, slo: Slo) -> tuple[str, ...]:
    """Each p95 above its target, in the middle run, and what was refused or failed, in words."""
    broken = []
    for field in fields(slo):
        target, value = getattr(slo, field.name), point.median(FIGURE_OF[field.name])
        if target is not None and value is not None and value > target:
            broken.append(f"{NAMES[field.name]} p95 {value:.0f} ms > {target:g} ms")
    if point.queue_kept is None:
        broken.append("queue time was not measured")
    for name, words in (("shed_percent", "shed"), ("error_percent", "failed")):
        share = point.median(name)
        if share is not None and share >= REFUSED_PERCENT:
            broken.append(f"{share:.1f} % {words}")
    return tuple(broken)
