"""Prometheus metrics, under vLLM's names where it has one. What can be derived is derived when it is read.

accepted = finished + aborted + failed + shed + in flight, always: only the terms on the right are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.api.record import Outcome, Record
from router.ports import PoolStatus

_log = structlog.get_logger()
_LOG_EVERY_S = 60.0
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

Arguments = ParamSpec("Arguments")


def _never_raises(method: Callable[Concatenate[Metrics, Arguments], None]) -> Callable[Concatenate[Metrics, Arguments], None]:
    """Serving goes on when a metric fails; one log line a minute says so."""

    def guarded(self: Metrics, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.complain()

    return guarded


class Metrics:
    """Of one router. Its own registry: several apps may live in one process."""

    def __init__(self, model: str, status: Callable[[], PoolStatus]) -> None:
        self.registry = CollectorRegistry()
        self._in_flight: dict[Record, None] = {}
        self._complained_s = float("-inf")
        labels = {"model_name": model}

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help_text, tuple(labels), registry=self.registry, buckets=buckets).labels(**labels)

        def counter(name: str, help_text: str) -> Counter:
            return Counter(name, help_text, tuple(labels), registry=self.registry).labels(**labels)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival at the router until the first token.", _SECONDS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between two deliveries of tokens to one choice.", _SECONDS)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival until the last token of a finished request.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival until the first step that scheduled it.", _SECONDS)
        self._prompt_sizes = histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS)
        self._output_sizes = histogram("vllm:request_generation_tokens", "Generated tokens of a finished request.", _TOKENS)
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._output = counter("vllm:generation_tokens", "Tokens generated and accepted.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in a prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in a prefix cache.")
        success = Counter("vllm:request_success", "Choices that ended well.", (*labels, "finished_reason"), registry=self.registry)
        self._success = {reason: success.labels(*labels.values(), reason) for reason in ("stop", "length")}
        self._ended = dict.fromkeys(Outcome, 0)
        self._shed = Counter("rantang:requests_shed", "Refused by the backend.", (*labels, "status", "reason"), registry=self.registry)
        self._refused = Counter("rantang:requests_invalid", "Answered 4xx before admission.", (*labels, "status"), registry=self.registry)
        self._labels = tuple(labels.values())
        self.registry.register(_OnRead(model, status, self))

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def ended(self, outcome: Outcome) -> int:
        return self._ended[outcome]

    @_never_raises
    def begin(self, record: Record) -> None:
        self._in_flight[record] = None

    @_never_raises
    def first_token(self, record: Record, now_s: float) -> None:
        self._ttft.observe(now_s - record.arrival_s)
        if record.queue_time_s is not None:
            self._queue.observe(record.queue_time_s)

    @_never_raises
    def gap(self, seconds: float) -> None:
        self._itl.observe(seconds)

    @_never_raises
    def end(self, record: Record, outcome: Outcome, now_s: float) -> None:
        """The one door out: a second call for the same record is ignored."""
        if record not in self._in_flight:
            return
        del self._in_flight[record]
        self._ended[outcome] += 1
        if outcome is Outcome.SHED:
            self._shed.labels(*self._labels, str(record.status), record.reason).inc()
        self._output.inc(record.completion_tokens)
        if record.first_token_s is not None:
            self._prompt.inc(record.prompt_tokens)
            self._queries.inc(record.prompt_tokens)
            self._hits.inc(record.cached_tokens)
        if outcome is Outcome.FINISHED:
            self._e2e.observe(now_s - record.arrival_s)
            self._prompt_sizes.observe(record.prompt_tokens)
            self._output_sizes.observe(record.completion_tokens)
            for reason in record.finish_reasons:
                self._success[reason].inc()

    @_never_raises
    def invalid(self, status: int) -> None:
        self._refused.labels(*self._labels, str(status)).inc()

    def complain(self) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= _LOG_EVERY_S:
            self._complained_s = now_s
            _log.exception("a metric could not be recorded")

    def render(self) -> bytes:
        """Prometheus' text format 0.0.4, in which colons in names stay as they are."""
        return generate_latest(self.registry)


class _OnRead(Collector):
    """Values that are computed when they are read, and so cannot drift."""

    def __init__(self, model: str, status: Callable[[], PoolStatus], metrics: Metrics) -> None:
        self._model = model
        self._status = status
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        gauges: tuple[tuple[str, str, float], ...] = (
            ("vllm:num_requests_running", "Requests that run on replicas.", status.running),
            ("vllm:num_requests_waiting", "Requests that wait, at the router and at replicas.", status.waiting + status.queued),
            ("vllm:kv_cache_usage_perc", "Part of the KV blocks that is referenced, 0 to 1.", status.kv_usage),
            ("rantang:requests_queued", "Requests that wait at this router.", status.queued),
            ("rantang:replicas", "Replicas connected.", status.replicas),
            ("rantang:ready", "1 when a request would be served now.", status.ready),
            ("rantang:requests_in_flight", "Client requests accepted and not ended.", self._metrics.in_flight),
        )
        for name, help_text, value in gauges:
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric([self._model], float(value))
            yield gauge
        preempted = CounterMetricFamily("vllm:num_preemptions", "Preemptions on the connected replicas.", labels=["model_name"])
        preempted.add_metric([self._model], status.preemptions)
        yield preempted
        ended = CounterMetricFamily("rantang:requests", "Requests by their end.", labels=["model_name", "outcome"])
        for outcome in Outcome:
            ended.add_metric([self._model, outcome.value], self._metrics.ended(outcome))
        yield ended
        accepted = CounterMetricFamily("rantang:requests_accepted", "Requests handed to the backend.", labels=["model_name"])
        accepted.add_metric([self._model], self._metrics.in_flight + sum(self._metrics.ended(outcome) for outcome in Outcome))
        yield accepted
