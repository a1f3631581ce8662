"""Logs and traces, configured once per process.

One event is one line: JSON where a machine reads it, colours on a terminal. The same event is written at most
`BURST` times in `PERIOD_S`; the next one that passes says how many were left out.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from cluster.config import ServeConfig

BURST = 20
PERIOD_S = 10.0
EVENTS_MAX = 256  # different events remembered

EventDict = MutableMapping[str, Any]


def configure(config: ServeConfig, process: str) -> None:
    """Logs of this process go to stderr, which Ray keeps per process; traces to OTLP if the usual variable names a collector."""
    stream = sys.__stderr__ or sys.stderr  # not what Serve puts in its place, which would log our lines once more at its own level
    console = stream.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            Named(process),
            RateLimit(time.monotonic),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=structlog.WriteLoggerFactory(stream),  # Serve replaces print() in its processes
        cache_logger_on_first_use=True,
    )
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        _export_traces(process)


def logger() -> Any:
    """The logger of this process; bind what every line should carry."""
    return structlog.get_logger()


class Named:
    """A structlog processor. Puts the process's name on every line."""

    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        event["process"] = self._process
        return event


class RateLimit:
    """A structlog processor. Drops an event after BURST in PERIOD_S; bounded in the number of events it remembers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}  # event → (start of its window, lines in it)

    def __call__(self, _logger: Any, method: str, event: EventDict) -> EventDict:
        key = f"{method} {event.get('event')}"
        now = self._clock()
        start, count = self._windows.get(key, (now, 0))
        if now - start >= PERIOD_S:
            if count > BURST:
                event["left_out"] = count - BURST
            start, count = now, 0
        if key not in self._windows and len(self._windows) >= EVENTS_MAX:
            self._windows.pop(next(iter(self._windows)))
        self._windows[key] = (start, count + 1)
        if count >= BURST:
            raise structlog.DropEvent
        return event


def _export_traces(process: str) -> None:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "rantang", "service.instance.id": process}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
