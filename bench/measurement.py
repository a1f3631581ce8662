"""One workload at one load on one server, some times over: the runs, their scorecards, and every request of them."""

from __future__ import annotations

import datetime
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from bench import descriptors, processes
from bench.arrivals import arrivals_s, due_times
from bench.connection import Target
from bench.load import BURST_RATE_PER_S, Load
from bench.load_client import Call, LoadClient, closed_loop, open_loop
from bench.point import Point, Repeat, spread_of
from bench.prompt_style import call_of
from bench.quantiles import Spread
from bench.record import RequestRecord
from bench.request_log import RequestRow, row_of
from bench.sampler import Sampler
from bench.scorecard import Cost, Goodput, Scorecard, ServerSide
from bench.server import Server
from bench.server_side import look_back
from bench.slo import Slo
from bench.summary import summarize
from bench.timeline import Timeline
from bench.usage import run_loop
from bench.workload import Workload

WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Question:
    """What is measured. `salt` makes the text of this measurement its own, so that no run finds the prefixes of an earlier one."""

    workload: Workload
    load: Load
    slo: Slo = field(default_factory=Slo)
    repeats: int = 1
    price_per_hour: float | None = None  # of one replica
    salt: str = ""
    label: str = "baseline"

    @property
    def offered(self) -> str:
        """In words."""
        at_once = self.load.streams is None and arrivals_s(self.workload, self.load) * BURST_RATE_PER_S <= len(self.workload) - 1
        return f"burst of {len(self.workload)}" if at_once and len(self.workload) > 1 else self.load.over(len(self.workload))


@dataclass(frozen=True, slots=True)
class Measured:
    point: Point
    rows: tuple[RequestRow, ...]


def measure(server: Server, asked: Question, *, index: int = 0, tell: Callable[[str], None] = lambda line: None) -> Measured:
    """All repeats, after a short warm-up. `index`: of this point in its result. What the server does wrong is counted, never raised."""
    _tell_of_few(asked, tell)
    repeats: list[Repeat] = []
    rows: list[RequestRow] = []
    warm_up = [replace(call, output_tokens=WARM_UP_TOKENS, cancel_after_s=None) for call in asked.workload.calls[:WARM_UP_REQUESTS]]
    for i in range(asked.repeats):
        salt = f"{asked.salt}/{index}/{asked.label}/{asked.load.description}/{i}"
        warm_up_calls = [call_of(call, server.style, f"{salt}/warm-up") for call in warm_up] if i == 0 else []
        calls = [call_of(call, server.style, salt) for call in asked.workload]
        started = datetime.datetime.now(datetime.UTC)
        run = _run(server, asked, warm_up_calls, calls)
        card = scorecard(run, asked, server.served.replicas)
        repeats.append(Repeat(started.isoformat(timespec="seconds"), card, run.timeline))
        rows += [row_of(record, point=index, repeat=i, start_s=run.start_s, accepted=asked.slo.kept_by(record)) for record in run.records]
        done = f"{card.goodput.accepted} of {card.summary.requests} accepted"
        tell(f"{asked.label}, {asked.workload.name}, {asked.offered}, run {i + 1} of {asked.repeats}: {done}")
    spread = spread_of([repeat.scorecard for repeat in repeats])
    point = Point(asked.label, asked.workload.facts, asked.load, asked.slo, server.served, tuple(repeats), spread)
    return Measured(point, tuple(rows))


def _tell_of_few(asked: Question, tell: Callable[[str], None]) -> None:
    """Of an open loop whose requests might have to wait for one another, since this process may open no more files."""
    wanted = min(descriptors.IN_FLIGHT_MAX, len(asked.workload))
    if asked.load.streams is None and (allowed := descriptors.allow(wanted)) < wanted:
        tell(f"at most {allowed:,} of {wanted:,} requests can be in flight: this process may open no more files (ulimit -Hn)")


@dataclass(frozen=True, slots=True)
class Run:
    """One run, before it is judged."""

    records: tuple[RequestRecord, ...]
    start_s: float
    server: ServerSide = field(default_factory=ServerSide)
    timeline: Timeline = field(default_factory=Timeline)
    client_cpu_cores: float | None = None


def scorecard(run: Run, asked: Question, replicas: int) -> Scorecard:
    summary = summarize(run.records)
    accepted = [record for record in run.records if asked.slo.kept_by(record)]
    judged = summary.requests - summary.cancelled
    tokens = sum(record.counts.completion_tokens or record.tokens_seen for record in accepted)
    goodput = Goodput(
        accepted=len(accepted),
        attainment_percent=round(100 * len(accepted) / judged, 3) if judged else None,
        requests_per_s=round(len(accepted) / summary.duration_s, 3) if summary.requests else 0.0,
        tokens_per_s=round(tokens / summary.duration_s, 2) if summary.requests else 0.0,
        queue_kept=_queue_kept(asked.slo, run.server.queue_ms),
    )
    price = asked.price_per_hour
    per_accepted = None if price is None or not accepted else price * replicas * summary.duration_s / 3600 / len(accepted)
    return Scorecard(
        _offered_per_s(run, asked.load), summary, goodput, run.server, run.client_cpu_cores, Cost(price, replicas, per_accepted)
    )


def _run(server: Server, asked: Question, warm_up: Sequence[Call], calls: Sequence[Call]) -> Run:
    target = Target.parse(server.url, server.api_key)
    if warm_up:
        run_loop(_offer(target, server, Load(streams=len(warm_up)), warm_up, ()))
    family = list(server.family()) if server.family is not None else []
    sampler = Sampler(metrics_url(server), (lambda: family) if family else None)
    times = () if asked.load.streams is not None else due_times(asked.workload, asked.load)
    cpu_before = processes.usage(family)
    sampler.start()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    try:
        with no_collection():
            records = run_loop(_offer(target, server, asked.load, calls, times))
    finally:
        wall_s = max(time.perf_counter() - start_s, 1e-9)
        samples = sampler.stop()
    client_cores = round((time.process_time() - cpu_s) / wall_s, 3)
    busy_s = sum(processes.usage(family).since(cpu_before).values())
    first_s = min((record.scheduled_s for record in records), default=start_s)
    last_s = max((record.end_s for record in records if record.end_s is not None), default=start_s)
    side, timeline = look_back(samples, first_s, last_s, round(busy_s / wall_s, 3) if family else None)
    return Run(tuple(records), first_s, side, timeline, client_cores)


def metrics_url(server: Server) -> str | None:
    """None with several routers: each counts its own, any of them answers, and one's counters say nothing of another's."""
    if server.served.configuration.get("routers", "1") != "1":
        return None
    return f"{server.url.rstrip('/').removesuffix('/v1')}/metrics"


async def _offer(target: Target, server: Server, load: Load, calls: Sequence[Call], times: Sequence[float]) -> list[RequestRecord]:
    client = LoadClient(
        target, timeout_s=server.timeout_s, reuse_connections=not load.new_connections, obey_retry_after=load.obey_retry_after
    )
    try:
        if load.streams is not None:
            descriptors.allow(min(load.streams, len(calls)))
            return await closed_loop(client, calls, streams=load.streams)
        return await open_loop(client, calls, times, in_flight_max=descriptors.allow(min(descriptors.IN_FLIGHT_MAX, len(calls))))
    finally:
        client.close()


@contextmanager
def no_collection() -> Iterator[None]:
    """Cyclic garbage waits until the run is over: a full collection stops every stream for milliseconds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _queue_kept(slo: Slo, queue_ms: Spread) -> bool | None:
    return None if slo.queue_ms is None or queue_ms.p95 is None else queue_ms.p95 <= slo.queue_ms


def _offered_per_s(run: Run, load: Load) -> float | None:
    """Open loop: requests over the time in which they were due; of a burst there is none. Closed: over the whole run."""
    if not run.records:
        return 0.0
    if load.streams is None and len(run.records) > 1:
        span_s = max(record.scheduled_s for record in run.records) - run.start_s
        rate = (len(run.records) - 1) / span_s if span_s > 0 else math.inf
        return round(rate, 3) if rate < BURST_RATE_PER_S else None
    return round(len(run.records) / summarize(run.records).duration_s, 3)
