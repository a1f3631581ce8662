"""One OpenTelemetry span per client request, child of the client's traceparent. Without an exporter it is nearly free."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.api.record import Outcome, Record

_propagator = TraceContextTextMapPropagator()
_NO_PARENT = Context()


class Tracing:
    """Makes spans. With no tracer provider configured by the time it is made, only the client's traceparent is checked and passed on."""

    __slots__ = ("_goes_nowhere", "_model", "_tracer", "_untraced")

    def __init__(self, model: str, tracer: Tracer | None = None) -> None:
        self._model = model
        self._tracer = tracer or trace.get_tracer("rantang")
        self._goes_nowhere = tracer is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        self._untraced = RequestSpan(trace.INVALID_SPAN, model)

    def begin(self, endpoint: str, headers: Mapping[str, str]) -> RequestSpan:
        traceparent = headers.get("traceparent", "")
        parent = _NO_PARENT
        if self._goes_nowhere and not traceparent:
            return self._untraced
        if traceparent:
            carrier = {"traceparent": traceparent, "tracestate": headers.get("tracestate", "")}
            parent = _propagator.extract(carrier, parent)
        span = self._tracer.start_span(f"POST {endpoint}", context=parent, kind=SpanKind.SERVER)
        return RequestSpan(span, self._model)


class RequestSpan:
    """The span of one request; all attributes are set at its end, from its Record."""

    __slots__ = ("_model", "_span")

    def __init__(self, span: Span, model: str) -> None:
        self._span = span
        self._model = model

    @property
    def traceparent(self) -> str:
        """Of this span, for the replica; the client's own where spans are off; "" where there is neither."""
        if not self._span.get_span_context().is_valid:
            return ""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get("traceparent", "")

    def end(self, record: Record, outcome: Outcome | None) -> None:
        """`outcome` None: refused before admission."""
        if not self._span.is_recording():
            return
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "rantang.cached_tokens": record.cached_tokens,
            "rantang.choices": record.choices,
            "rantang.class": record.terms.request_class,
            "rantang.outcome": outcome.value if outcome else "invalid",
            "http.response.status_code": record.status,
        }
        if record.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = record.finish_reasons
        if record.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = record.first_token_s - record.arrival_s
        if record.queue_time_s is not None:
            attributes["rantang.queue_time_s"] = record.queue_time_s
        predicted = record.predicted
        if predicted is not None:
            attributes["rantang.predicted_queue_time_s"] = predicted.queue_time_s
            attributes["rantang.predicted_time_to_first_token_s"] = predicted.ttft_s
            attributes["rantang.predicted_cached_tokens"] = predicted.cached_tokens
        if record.reason:
            attributes["rantang.reason"] = record.reason
        self._span.set_attributes(attributes)
        if outcome is Outcome.FAILED:
            self._span.set_status(Status(StatusCode.ERROR, record.reason))
        self._span.end()
