"""From samples of a server to what it says of itself: high waters, what counters gained, and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.metrics_page import QUEUE_TIME, RUNNING, WAITING, MetricsPage, parse
from bench.quantiles import Spread
from bench.sampler import Sample
from bench.scorecard import ServerSide
from bench.timeline import SAMPLES_MAX, Timeline

KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
SHED = "rantang:requests_shed_total"


@dataclass(frozen=True, slots=True)
class _Seen:
    time_s: float
    page: MetricsPage | None
    memory_mib: float | None


def look_back(samples: Sequence[Sample], start_s: float, end_s: float, cpu_cores: float | None) -> tuple[ServerSide, Timeline]:
    """Of one run, from when its first request was due to its last answer's end. What no page says is None.

    Counters are told by the pages before and after the run, gauges only by those in between that found the server at work.
    """
    seen = [_Seen(sample.time_s - start_s, _parsed(sample.page), _mib(sample.memory_bytes)) for sample in samples]
    pages = [each.page for each in seen if each.page is not None]
    gained = pages[-1].since(pages[0]) if len(pages) > 1 else None
    between = [each.page for each in seen if each.page is not None and 0 <= each.time_s <= end_s - start_s]
    at_work = between if any(map(_busy, between)) else []
    kv_use = _most(at_work, _kv_use)
    side = ServerSide(
        queue_ms=_queue_ms(gained),
        preemptions=_value(gained, PREEMPTIONS),
        prefix_hit_percent=_hit_percent(gained),
        kv_use_max_percent=None if kv_use is None else round(100 * kv_use, 2),
        running_max=_most(at_work, lambda page: page.values.get(RUNNING)),
        waiting_max=_most(at_work, lambda page: page.values.get(WAITING)),
        memory_max_mib=max((each.memory_mib for each in seen if each.memory_mib is not None), default=None),
        cpu_cores=cpu_cores,
    )
    return side, _timeline(seen, pages[0] if pages else None)


def _timeline(seen: Sequence[_Seen], first: MetricsPage | None) -> Timeline:
    every = -(-len(seen) // SAMPLES_MAX)
    kept = seen[::every] if every else []

    def column(get: Callable[[MetricsPage], float | None]) -> tuple[float | None, ...]:
        return tuple(None if each.page is None else get(each.page) for each in kept)

    def gain(name: str) -> Callable[[MetricsPage], float | None]:
        return lambda page: None if first is None or name not in page.values else page.values[name] - first.values.get(name, 0.0)

    queue: list[float | None] = []
    before: MetricsPage | None = None
    for each in kept:
        queue.append(_mean_queue_ms(before, each.page))
        before = each.page or before
    return Timeline(
        time_s=tuple(round(each.time_s, 3) for each in kept),
        running=column(lambda page: page.values.get(RUNNING)),
        waiting=column(lambda page: page.values.get(WAITING)),
        kv_use_percent=column(lambda page: None if (use := _kv_use(page)) is None else round(100 * use, 2)),
        queue_ms=tuple(queue),
        shed=column(gain(SHED)),
        preemptions=column(gain(PREEMPTIONS)),
        memory_mib=tuple(each.memory_mib for each in kept),
    )


def _mean_queue_ms(before: MetricsPage | None, page: MetricsPage | None) -> float | None:
    if before is None or page is None:
        return None
    gained = page.since(before).values
    count = gained.get(f"{QUEUE_TIME}_count", 0.0)
    return round(1e3 * gained.get(f"{QUEUE_TIME}_sum", 0.0) / count, 3) if count > 0 else None


def _queue_ms(gained: MetricsPage | None) -> Spread:
    if gained is None:
        return Spread()
    quantiles_s = [gained.quantile(QUEUE_TIME, q) for q in (0.5, 0.95, 0.99)]
    return Spread(*(None if value is None else round(1e3 * value, 3) for value in quantiles_s))


def _hit_percent(gained: MetricsPage | None) -> float | None:
    queries, hits = _value(gained, PREFIX_QUERIES), _value(gained, PREFIX_HITS)
    return round(100 * hits / queries, 2) if queries and hits is not None else None


def _kv_use(page: MetricsPage) -> float | None:
    return next((page.values[name] for name in KV_USE if name in page.values), None)


def _busy(page: MetricsPage) -> bool:
    """Whether this reading fell on work: of a run whose every reading fell beside it no high water is known, and none is 0."""
    return any((page.values.get(RUNNING), page.values.get(WAITING), _kv_use(page)))


def _value(page: MetricsPage | None, name: str) -> float | None:
    """What a counter gained; None where it fell, since whoever counted is gone."""
    value = None if page is None else page.values.get(name)
    return value if value is None or value >= 0 else None


def _most(pages: Sequence[MetricsPage], get: Callable[[MetricsPage], float | None]) -> float | None:
    return max((value for page in pages if (value := get(page)) is not None), default=None)


def _parsed(text: str | None) -> MetricsPage | None:
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**20, 1)
