"""What a simulation came to, as one flat object. Fractions are of the offered requests; nothing of the real clock is in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from bench.quantiles import quantile
from bench.simulator.journey import COVERED, Journey
from bench.simulator.slo import Slo
from bench.simulator.world import World

LENGTHS = (128, 512, 2048)  # upper ends of the buckets of tokens to prefill
_DIGITS = 6


_GOOD = Slo()


def score(world: World, slo: Slo) -> dict[str, Any]:
    journeys = world.journeys
    done = [one for one in journeys if one.first_s is not None]
    ttfts = sorted(one.ttft_s for one in done if one.ttft_s is not None)
    tpots = sorted(tpot for one in done if (tpot := one.tpot_s) is not None)
    met = [one for one in journeys if slo.is_met(one)]
    offered = max(1, len(journeys))
    tokens = max(1, sum(_tokens(one) for one in journeys))
    loads = [station.held_s for station in world.stations]
    mean_load = sum(loads) / len(loads)
    shed = [one for one in journeys if one.rejected is not None and one.rejected[0] == 429]
    figures = {
        "requests": len(journeys),
        "completed": sum(one.is_complete for one in journeys),
        "shed_fraction": len(shed) / offered,
        "failed": sum(one.ends != 1 or (one.rejected is None and not one.is_complete and not one.is_cancelled) for one in journeys),
        "hit_rate": sum(one.cached_tokens for one in done) / max(1, sum(one.request.prompt_tokens for one in done)),
        "ttft_p50_s": quantile(ttfts, 0.5),
        "ttft_p95_s": quantile(ttfts, 0.95),
        "ttft_p99_s": quantile(ttfts, 0.99),
        "tpot_p50_s": quantile(tpots, 0.5),
        "tpot_p95_s": quantile(tpots, 0.95),
        "good_fraction": sum(_GOOD.is_met(one) for one in journeys) / offered,
        "goodput_fraction": len(met) / offered,
        "token_goodput_fraction": sum(_tokens(one) for one in met) / tokens,
        "shed_by_length_fifth": _shed_by_fifth(journeys),
        "load_max_over_mean": max(loads) / mean_load if mean_load > 0 else None,
        "makespan_s": max((one.ended_s for one in journeys if one.ended_s is not None), default=0.0),
        "events": world.agenda.events,
    }
    rounded: dict[str, Any] = _rounded(figures | coverage(done))
    return rounded


def coverage(done: Sequence[Journey]) -> dict[str, Any]:
    """How often the time to first token stayed below what the router had predicted, by quantile; how far off the median was."""
    met = [(one.promise, one.first_s - one.promise.sent_s) for one in done if one.promise is not None and one.first_s is not None]
    buckets: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for promise, actual_s in met:
        place = bisect_left(LENGTHS, promise.new_tokens)
        name = f"<={LENGTHS[place]}" if place < len(LENGTHS) else f">{LENGTHS[-1]}"
        buckets.setdefault(name, []).append((promise.quantiles_s, actual_s))
    everyone = [(promise.quantiles_s, actual_s) for promise, actual_s in met]
    ratio = sorted(actual_s / promise.constant_s for promise, actual_s in met if promise.constant_s > 0)
    constants = [quantile(ratio, q) or 1.0 for q in COVERED]  # in hindsight, the best constant scale for each quantile
    baseline = [(tuple(promise.constant_s * by for by in constants), actual_s) for promise, actual_s in met]
    errors = sorted(abs(quantiles[0] - actual_s) / actual_s for quantiles, actual_s in everyone if actual_s > 0)
    return {
        "ttft_coverage": _covered(everyone),
        "ttft_coverage_by_length": {name: {"n": len(buckets[name])} | _covered(buckets[name]) for name in sorted(buckets)},
        "ttft_median_error": quantile(errors, 0.5),
        "ttft_pinball_s": _pinball(everyone),
        "ttft_pinball_constant_s": _pinball(baseline),
    }


def _covered(pairs: Sequence[tuple[tuple[float, ...], float]]) -> dict[str, float]:
    return {str(q): sum(actual_s <= values[i] for values, actual_s in pairs) / max(1, len(pairs)) for i, q in enumerate(COVERED)}


def _pinball(pairs: Sequence[tuple[tuple[float, ...], float]]) -> float:
    """Mean over requests and quantiles: the loss that the true quantiles make least."""
    total = 0.0
    for values, actual_s in pairs:
        total += sum(max(q * (actual_s - value), (q - 1.0) * (actual_s - value)) for q, value in zip(COVERED, values, strict=True))
    return total / max(1, len(pairs) * len(COVERED))


def _shed_by_fifth(journeys: Sequence[Journey]) -> list[float]:
    """Part of each fifth of the prompt lengths that was refused, shortest first."""
    ordered = sorted(journeys, key=lambda one: (one.request.prompt_tokens, one.number))
    size = max(1, -(-len(ordered) // 5))
    fifths = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return [sum(one.rejected is not None for one in fifth) / len(fifth) for fifth in fifths]


def _tokens(journey: Journey) -> int:
    return journey.request.prompt_tokens + journey.request.output_tokens


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
