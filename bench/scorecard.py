"""The figures by which runs are compared. None: not measured, or the server does not say; never 0 instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.quantiles import Spread
from bench.summary import Summary


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of completed responses within the SLO ("accepted")."""

    accepted: int
    attainment_percent: float | None  # accepted, of all requests that the client did not cancel
    requests_per_s: float
    tokens_per_s: float
    queue_kept: bool | None = None  # whether the p95 of queue time kept its target; None: no target, or not measured


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What the server says of itself during the run (/metrics), and /proc where the stack is our own."""

    queue_ms: Spread = field(default_factory=Spread)  # interpolated in the histogram's buckets
    preemptions: float | None = None
    prefix_hit_percent: float | None = None
    kv_use_max_percent: float | None = None
    running_max: float | None = None
    waiting_max: float | None = None
    memory_max_mib: float | None = None  # PSS, all processes
    cpu_cores: float | None = None  # busy cores, all processes, mean over the run


@dataclass(frozen=True, slots=True)
class Cost:
    """In the currency of the price. None: no price given, or nothing accepted."""

    price_per_replica_hour: float | None = None
    replicas: int = 1
    per_accepted: float | None = None


@dataclass(frozen=True, slots=True)
class Scorecard:
    """One run of one workload at one load."""

    offered_per_s: float | None  # None: all was due at once
    summary: Summary
    goodput: Goodput
    server: ServerSide = field(default_factory=ServerSide)
    client_cpu_cores: float | None = None
    cost: Cost = field(default_factory=Cost)

    def figure(self, name: str) -> float | None:
        """By the name in FIGURES. Raises ValueError with the list for an unknown one."""
        return figure(name).get(self)


@dataclass(frozen=True, slots=True)
class Figure:
    """One comparable figure. `better`: "higher", "lower", or "" when neither is."""

    name: str
    title: str
    unit: str
    better: str
    get: Callable[[Scorecard], float | None]


def _share(part: int, card: Scorecard) -> float | None:
    return round(100 * part / card.summary.requests, 3) if card.summary.requests else None


FIGURES: tuple[Figure, ...] = (
    Figure("offered_per_s", "offered", "req/s", "", lambda c: c.offered_per_s),
    Figure("completed_per_s", "completed", "req/s", "higher", lambda c: c.summary.completed_per_s),
    Figure("goodput_per_s", "goodput", "req/s", "higher", lambda c: c.goodput.requests_per_s),
    Figure("goodput_tokens_per_s", "goodput", "tok/s", "higher", lambda c: c.goodput.tokens_per_s),
    Figure("attainment_percent", "within SLO", "%", "higher", lambda c: c.goodput.attainment_percent),
    Figure("accepted_percent", "accepted of all", "%", "", lambda c: _share(c.goodput.accepted, c)),
    Figure("output_tokens_per_s", "output", "tok/s", "higher", lambda c: c.summary.output_tokens_per_s),
    Figure("ttft_p50_ms", "TTFT p50", "ms", "lower", lambda c: c.summary.latencies.ttft_ms.p50),
    Figure("ttft_p95_ms", "TTFT p95", "ms", "lower", lambda c: c.summary.latencies.ttft_ms.p95),
    Figure("ttft_p99_ms", "TTFT p99", "ms", "lower", lambda c: c.summary.latencies.ttft_ms.p99),
    Figure("itl_p50_ms", "inter-token p50", "ms", "lower", lambda c: c.summary.latencies.itl_ms.p50),
    Figure("itl_p95_ms", "inter-token p95", "ms", "lower", lambda c: c.summary.latencies.itl_ms.p95),
    Figure("tpot_p50_ms", "time per token p50", "ms", "lower", lambda c: c.summary.latencies.tpot_ms.p50),
    Figure("tpot_p95_ms", "time per token p95", "ms", "lower", lambda c: c.summary.latencies.tpot_ms.p95),
    Figure("e2e_p50_ms", "end to end p50", "ms", "lower", lambda c: c.summary.latencies.e2e_ms.p50),
    Figure("e2e_p95_ms", "end to end p95", "ms", "lower", lambda c: c.summary.latencies.e2e_ms.p95),
    Figure("queue_p50_ms", "queue time p50", "ms", "lower", lambda c: c.server.queue_ms.p50),
    Figure("queue_p95_ms", "queue time p95", "ms", "lower", lambda c: c.server.queue_ms.p95),
    Figure("error_percent", "errors", "%", "lower", lambda c: _share(c.summary.errors, c)),
    Figure("shed_percent", "shed", "%", "lower", lambda c: _share(c.summary.shed, c)),
    Figure("cancelled", "cancelled", "requests", "", lambda c: float(c.summary.cancelled)),
    Figure("retries", "retries", "requests", "lower", lambda c: float(c.summary.retries)),
    Figure("preemptions", "preemptions", "", "lower", lambda c: c.server.preemptions),
    Figure(
        "prefix_hit_percent",
        "prefix hits",
        "%",
        "higher",
        lambda c: _first_known(c.summary.prefix_hit_percent, c.server.prefix_hit_percent),
    ),
    Figure("kv_use_max_percent", "KV high water", "%", "", lambda c: c.server.kv_use_max_percent),
    Figure("running_max", "running, most", "requests", "", lambda c: c.server.running_max),
    Figure("waiting_max", "waiting, most", "requests", "", lambda c: c.server.waiting_max),
    Figure("memory_max_mib", "memory high water", "MiB", "lower", lambda c: c.server.memory_max_mib),
    Figure("server_cpu_cores", "server CPU", "cores", "", lambda c: c.server.cpu_cores),
    Figure("client_cpu_cores", "client CPU", "cores", "", lambda c: c.client_cpu_cores),
    Figure("send_lag_p99_ms", "client late p99", "ms", "lower", lambda c: c.summary.latencies.send_lag_ms.p99),
    Figure("cost_per_accepted", "cost per accepted", "", "lower", lambda c: c.cost.per_accepted),
)
_BY_NAME = {each.name: each for each in FIGURES}


def figure(name: str) -> Figure:
    """Raises ValueError with the list of names for an unknown one."""
    if name not in _BY_NAME:
        raise ValueError(f"unknown metric {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def figures_of(card: Scorecard) -> dict[str, float | None]:
    """All of them by name, in the order of FIGURES."""
    return {each.name: each.get(card) for each in FIGURES}


def _first_known(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
