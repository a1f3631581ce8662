"""Prometheus metrics, under vLLM's names where it has one. What can be derived is derived when it is read.

accepted = finished + aborted + failed + shed + in flight, always: only the terms on the right are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Concatenate, ParamSpec

import structlog
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.api.record import Outcome, Record
from router.api.tally import Series, Tally
from router.policy.classes import Classes
from router.ports import Backend

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

_PARTS = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5)  # of a promise
TOTALS = {
    "hit_tokens_predicted": "Prompt tokens that the router believed to be cached where it sent them.",
    "hit_tokens_actual": "Prompt tokens that were, of the same requests.",
    "prefix_index_resyncs": "Snapshots asked for, because events of a replica were missed.",
    "prefix_index_bytes": "Memory of the prefix index.",
    "retries": "Attempts that a replica did not take, sent to another.",
    "queued_tokens": "Prompt tokens that wait at this router.",
    "routers": "Live routers, as the replicas see them.",
    "predictions": "Predictions that met their outcome, by length to prefill.",
    "predictions_within": "Of those, how many stayed within the predicted quantile.",
    "untrue_reports": "What replicas said that could not be true, or clocks that stepped back; it was not believed.",
    "replica_weight": "How far a replica is trusted: 1; less when it is overdue or has just been in trouble; 0 out of routing.",
    "replica_report_age_seconds": "Since a replica's last report that was believed.",
    "replica_step_time_spread": "By which part of what a replica has fitted one step in twenty takes longer.",
    "replica_busy_seconds": "That a replica's steps have taken: its rate is how busy the engine is.",
    "replica_foreseen_seconds": "That they had been predicted to take.",
    "replica_step_time_seconds": "What a replica has fitted: a step's time = a + b·prefill + c·decodes + d·context + e·prefill·context.",
    "replica_limit": "What a replica's engine enforces, by name.",
}

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

    def __init__(self, model: str, backend: Backend, classes: Classes) -> None:
        self.registry = CollectorRegistry()
        self._in_flight: dict[Record, None] = {}
        self._complained_s = float("-inf")
        labels = {"model_name": model}

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Series:
            return Tally(name, help_text, tuple(labels), buckets, self.registry).labels(model)

        def counter(name: str, help_text: str) -> Counter:
            return Counter(name, help_text, tuple(labels), registry=self.registry).labels(**labels)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival at the router until the first token.", _SECONDS)
        gaps = histogram("vllm:inter_token_latency_seconds", "Between two deliveries of tokens to one choice.", _SECONDS)
        self.gap = gaps.observe
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival until the last token of a finished request.", _SECONDS)
        around = _around([one.slo.queue_time_s for one in classes])
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival until the first step that scheduled it.", around)
        by_class = Tally("rantang:queue_time_seconds", "The same, by class.", (*labels, "request_class"), around, self.registry)
        kept = Counter(
            "rantang:slo", "First tokens by what was promised.", (*labels, "request_class", "of", "kept"), registry=self.registry
        )
        self._by_class = {one.name: _OfClass(by_class, kept, (model, one.name)) for one in classes}
        self._classes = classes
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
        self._shed_for: dict[tuple[int, str], Counter] = {}  # `labels()` costs more than all else at a refusal
        self.registry.register(_OnRead(model, backend, self))

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
        of_class = self._by_class.get(record.terms.request_class)
        if of_class is None or record.queue_time_s is None:
            return
        self._queue.observe(record.queue_time_s)
        slo = self._classes.slo(record.terms)
        of_class.queue.observe(record.queue_time_s)
        of_class.queue_time[record.queue_time_s <= slo.queue_time_s].inc()
        if slo.ttft_s is not None and record.predicted is not None:
            of_class.ttft[now_s - record.arrival_s <= slo.ttft_within_s(record.predicted.new_tokens)].inc()

    @_never_raises
    def end(self, record: Record, outcome: Outcome, now_s: float) -> None:
        """The one door out: a second call for the same record is ignored."""
        if record not in self._in_flight:
            return
        del self._in_flight[record]
        self._ended[outcome] += 1
        if outcome is Outcome.SHED:
            self._shed_as(record.status, record.reason).inc()
        if record.completion_tokens:
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

    def _shed_as(self, status: int, reason: str) -> Counter:
        found = self._shed_for.get((status, reason))
        if found is None:
            found = self._shed_for[status, reason] = self._shed.labels(*self._labels, str(status), reason)
        return found

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


class _OfClass:
    """One class's children, looked up once."""

    __slots__ = ("queue", "queue_time", "ttft")

    def __init__(self, queue: Tally, kept: Counter, labels: tuple[str, str]) -> None:
        self.queue = queue.labels(*labels)
        self.queue_time = {yes: kept.labels(*labels, "queue_time", str(yes).lower()) for yes in (False, True)}
        self.ttft = {yes: kept.labels(*labels, "ttft", str(yes).lower()) for yes in (False, True)}


def _around(slos_s: Sequence[float]) -> tuple[float, ...]:
    """Buckets that are fine where it matters: round each promise."""
    return tuple(sorted({*_SECONDS, *(round(slo_s * part, 6) for slo_s in slos_s for part in _PARTS)}))


class _OnRead(Collector):
    """Values that are computed when they are read, and so cannot drift."""

    def __init__(self, model: str, backend: Backend, metrics: Metrics) -> None:
        self._model = model
        self._backend = backend
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        status = self._backend.status()
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
        moves = CounterMetricFamily("rantang:stream_moves", "Streams that went on at another replica.", labels=["model_name"])
        moves.add_metric([self._model], status.moves)
        yield moves
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for total in self._backend.account().totals:
            names = ["model_name", *(name for name, _ in total.labels)]
            kind = GaugeMetricFamily if total.is_gauge else CounterMetricFamily
            family = families.setdefault(total.name, kind(f"rantang:{total.name}", TOTALS[total.name], labels=names))
            family.add_metric([self._model, *(value for _, value in total.labels)], total.value)
        yield from families.values()
