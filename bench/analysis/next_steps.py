"""What to measure next where an SLO broke and no rule names a bound."""

from __future__ import annotations

from bench.analysis.evidence import Evidence

REQUESTS_MIN = 20  # of fewer a p95 is the slowest one


def next_steps(e: Evidence) -> tuple[str, ...]:
    """The most telling first; never none."""
    steps = []
    if not e.arriving:
        steps.append("the server's own figures, of which none were read (its /metrics)")
    if e.requests < REQUESTS_MIN:
        steps.append(f"more requests: of {e.requests} a p95 is the slowest one")
    if not e.calmer and not e.at_once:
        steps.append("the same at a lower load: what stays as it is, is the requests' own cost")
    if e.late_prompts:
        steps.append("the same prompts alone (--streams 1): what they take without anybody else")
    if e.late_gaps[0]:
        steps.append("smaller steps (--change max_num_batched_tokens=128): whether prompts hold the gaps up")
    return tuple(steps or ["the same again with --repeats 3: whether it was chance"])
