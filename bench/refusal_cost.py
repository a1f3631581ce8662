"""What a refusal costs the router's process: bursts of 160 requests of 400 ids at once, at a replica that is full for minutes.

`python -m bench.refusal_cost`: CPU per refusal and burst of the router's whole process, HTTP included, on a core of its own, less what it
uses when nothing is asked; the middle one of the bursts, and the first byte of the answers on the client's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from bench import result
from bench.connection import Target
from bench.drills import overload
from bench.load_client import Call, LoadClient
from bench.quantiles import quantile
from bench.record import Outcome, RequestRecord
from bench.result import Result
from bench.router_cost import cpu_s, id_prompts, router

WARM_UPS = 3
PAUSE_S = 0.25
IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Burst:
    """One of them: CPU of the router's process, and what was answered."""

    cpu_us: float  # per request, idle load taken off
    records: Sequence[RequestRecord]

    @property
    def refused(self) -> list[RequestRecord]:
        """At arrival, before anything of the text was read."""
        return [one for one in self.records if one.outcome is Outcome.SHED and overload.reason(one) == overload.AT_ARRIVAL]

    @property
    def first_byte_p95_ms(self) -> float | None:
        times = [1e3 * (one.first_byte_s - one.sent_s) for one in self.refused if one.first_byte_s is not None and one.sent_s is not None]
        return quantile(times, 0.95)


async def idle_load(pid: int) -> float:
    """Part of a core that it uses when nothing is asked."""
    before_s, began_s = cpu_s(pid), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    return (cpu_s(pid) - before_s) / (time.perf_counter() - began_s)


async def burst(client: LoadClient, pid: int, calls: Sequence[Call], idle: float) -> Burst:
    before_s, began_s = cpu_s(pid), time.perf_counter()
    records = await asyncio.gather(*(client.send(call) for call in calls))
    used_s = cpu_s(pid) - before_s - idle * (time.perf_counter() - began_s)
    return Burst(1e6 * used_s / len(records), records)


async def measure(pid: int, url: str, *, bursts: int, requests: int) -> list[Burst]:
    """On open connections, as many as requests; the first bursts warm up and are left out."""
    client = LoadClient(Target.parse(url))
    calls = id_prompts(requests, overload.PROMPT_TOKENS, 32)
    measured: list[Burst] = []
    try:
        await client.open_ahead(requests)
        idle = await idle_load(pid)
        for _ in range(WARM_UPS + bursts):
            measured.append(await burst(client, pid, calls, idle))
            await asyncio.sleep(PAUSE_S)
    finally:
        client.close()
    return measured[WARM_UPS:]


def report(bursts: Sequence[Burst], configuration: dict[str, str]) -> Result:
    others = sum(len(one.records) - len(one.refused) for one in bursts)
    costs = [one.cpu_us for one in bursts]
    times = [one.first_byte_p95_ms for one in bursts if one.first_byte_p95_ms is not None]
    metrics = (
        result.at_most("otherwise_answered", float(others), 0, "requests"),
        result.plain("cpu_per_refusal.p50", quantile(costs, 0.5), "us"),
        result.plain("cpu_per_refusal.least", min(costs, default=None), "us"),
        result.plain("first_byte_p95.p50", quantile(times, 0.5), "ms"),
    )
    return Result("refusal-cost", configuration, metrics=metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bursts", type=int, default=30, help="after three to warm up")
    parser.add_argument("--requests", type=int, default=overload.REQUESTS, help="of each")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    with router(1, cores, "--full") as (pid, url):
        bursts = uvloop.run(measure(pid, url, bursts=options.bursts, requests=options.requests))
    outcome = report(bursts, {"bursts": str(options.bursts), "requests": str(options.requests), "replicas": "1, a mock of the link"})
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
