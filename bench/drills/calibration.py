"""Drill: does a real replica do what was predicted of it? 2,000 requests of mixed lengths, arriving at random, at little more than
half of what the replica bears (a closed loop before them tells), so that machines of any speed have queues and none drowns.

Of every request the router's prediction and what came of it are kept (/debug/decisions): how often each quantile of the time to
first token held, by length; the error of the median; the loss beside a constant scale. Then the same trace runs through the
simulator, with the step times that this replica had fitted: do both agree? `python -m bench.drills.calibration`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from bench import result, stack
from bench.arrivals import poisson
from bench.connection import Target
from bench.drills.readings import Reading, Twin, read, twin
from bench.load_client import Call, LoadClient, closed_loop, open_loop
from bench.prompt_style import PromptStyle, completion, random_ids
from bench.quantiles import quantile
from bench.record import Outcome, RequestRecord
from bench.result import Metric, Result, WorkResult
from bench.simulator.journey import Journey, Promise
from bench.simulator.score import coverage
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import TraceRequest, own_keys
from bench.simulator.world import Layout
from bench.summary import summarize

KEPT = 500  # decisions that the router keeps, and how many it is asked for at once
KEEP_S = 30.0  # between two looks at them: no more than KEPT come meanwhile
POLL_S = 1.0
OUTPUT_TOKENS = 16
LENGTHS = ((0.45, 24, 120), (0.40, 140, 480), (0.15, 540, 1_200))  # part, least and most tokens
BANDS = {"0.5": (45.0, 55.0), "0.9": (87.0, 93.0), "0.98": (97.0, 100.0)}
MEDIAN_ERROR_MAX = 15.0
AGREEMENT_MAX = 20.0
LOAD = 0.55  # of what the replica bears
STREAMS = 8  # of the loop that tells what that is
LOOPED = 64  # its requests
ENOUGH = 100  # of a length, below which its coverage is shown and not judged


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one machine, whose processes share a clock: `began_s` is by that of the router and of the client."""

    began_s: float
    records: tuple[RequestRecord, ...]  # in the order of the trace
    decisions: tuple[Mapping[str, Any], ...]  # of these requests: their ids are those of the answers
    readings: tuple[Reading, ...]  # of the replica, while it was loaded


def shapes(count: int, rate_per_s: float, seed: int) -> tuple[TraceRequest, ...]:
    """The trace: prompts share nothing."""
    draw = random.Random(f"calibration/{seed}")
    ranges = draw.choices([(least, most) for _, least, most in LENGTHS], [part for part, _, _ in LENGTHS], k=count)
    return tuple(
        TraceRequest(arrival_s, tokens := draw.randint(*ends), OUTPUT_TOKENS, own_keys(number, tokens, 16))
        for number, (arrival_s, ends) in enumerate(zip(poisson(rate_per_s, count, seed), ranges, strict=True))
    )


async def run(url: str, count: int, rate_per_s: float | None, seed: int) -> tuple[tuple[TraceRequest, ...], Seen]:
    client = LoadClient(Target.parse(url), timeout_s=120.0)
    draw = random.Random(f"calibration/{seed}/ids")
    kept: dict[str, Mapping[str, Any]] = {}
    pages: list[tuple[float, str]] = []
    try:
        looped = await closed_loop(client, _calls(shapes(LOOPED, 1.0, seed + 1), draw), streams=STREAMS)
        trace = shapes(count, rate_per_s or LOAD * summarize(looped).completed_per_s, seed)
        calls = _calls(trace, draw)
        began_s = looked_s = time.monotonic()
        load = asyncio.create_task(open_loop(client, calls, [one.arrival_s for one in trace]))
        while True:
            page = await asyncio.to_thread(stack.get_text, f"{url}/metrics")
            pages.append((time.monotonic() - began_s, page))
            if load.done():
                break
            await asyncio.wait([load], timeout=POLL_S)
            if time.monotonic() - looked_s > KEEP_S:
                looked_s = time.monotonic()
                await _keep(url, kept)
        await _keep(url, kept)
        records = await load
    finally:
        client.close()
    decisions = [kept[record.answer.id] for record in records if record.answer.id in kept]
    return trace, Seen(began_s, tuple(records), tuple(decisions), tuple(read(page, at_s) for at_s, page in pages))


def _calls(trace: Sequence[TraceRequest], draw: random.Random) -> list[Call]:
    return [completion(random_ids(draw, one.prompt_tokens), one.output_tokens, PromptStyle("smollm2")) for one in trace]


async def _keep(url: str, kept: dict[str, Mapping[str, Any]]) -> None:
    """Later looks bring the outcomes of earlier decisions."""
    page = json.loads(await asyncio.to_thread(stack.get_text, f"{url}/debug/decisions"))
    kept.update((one["request_id"], one) for one in page["data"])


def as_it_came(seen: Seen, trace: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The trace with the times at which the router decided; on a busy machine a client sends late."""
    came_s = {one["request_id"]: one["at_s"] - seen.began_s for one in seen.decisions}
    both = zip(trace, seen.records, strict=True)
    found = [replace(one, arrival_s=came_s.get(record.answer.id, one.arrival_s)) for one, record in both]
    return tuple(sorted(found, key=lambda one: one.arrival_s))


def outside_s(seen: Seen) -> float:
    """The median of what a request's first token took for the client and not for the router: sending, HTTP, and reading."""
    routers_s = {one["request_id"]: one["actual"]["ttft_s"] for one in seen.decisions if one["actual"] is not None}
    both = [(record.ttft_s, routers_s.get(record.answer.id)) for record in seen.records]
    return quantile([own_s - its_s for own_s, its_s in both if own_s is not None and its_s is not None], 0.5) or 0.0


def journeys(decisions: Sequence[Mapping[str, Any]]) -> list[Journey]:
    """Each admitted request with what was expected of it, in the simulator's terms."""
    found: list[Journey] = []
    for one in decisions:
        place = next((each for each in one["candidates"] if each["replica"] == one["replica"]), None)
        if one["verdict"] != "admitted" or one["actual"] is None or place is None:
            continue
        journey = Journey(len(found), TraceRequest(0.0, one["prompt_tokens"], OUTPUT_TOKENS), 0, first_s=one["actual"]["ttft_s"])
        quantiles = (place["ttft_s"], place["ttft_p90_s"], place["ttft_p98_s"])
        journey.promise = Promise(place["new_tokens"], 0.0, quantiles, place["ttft_uncalibrated_s"])
        found.append(journey)
    return found


def simulated(one: Twin, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """The same trace on one replica with the production scheduler and KV manager that costs what the real one did."""
    return Setup(layout=Layout(replicas=1), profile=one.profile, kv="production", course=one.course).run(trace, Slo())


def report(seen: Seen, trace: Sequence[TraceRequest], configuration: dict[str, str]) -> Result:
    met = journeys(seen.decisions)
    figures = coverage(met)
    ttfts = [record.ttft_s for record in seen.records if record.outcome is Outcome.COMPLETED and record.ttft_s is not None]
    one, outside = twin(seen.readings), outside_s(seen)
    expected = simulated(one, as_it_came(seen, trace))
    metrics: list[Metric] = [
        result.at_most("failed", float(len(seen.records) - len(ttfts)), 0, "requests"),
        result.at_least("predictions", float(len(met)), 0.95 * len(trace), "that met their outcome"),
    ]
    for name, counts in (("all", {"n": len(met)} | figures["ttft_coverage"]), *figures["ttft_coverage_by_length"].items()):
        metrics.append(result.plain(f"n.{name}", float(counts["n"]), "requests"))
        metrics += [_banded(f"coverage.{q}.{name}", 100 * counts[q], band, judged=counts["n"] >= ENOUGH) for q, band in BANDS.items()]
    error = figures["ttft_median_error"]
    metrics.append(result.at_most("median_error", None if error is None else 100 * error, MEDIAN_ERROR_MAX, "%"))
    metrics.append(
        result.at_most("pinball", 1e3 * figures["ttft_pinball_s"], 1e3 * figures["ttft_pinball_constant_s"], "ms, a constant scale's")
    )
    for name, q in (("p50", 0.5), ("p95", 0.95)):
        metrics += _agreement(name, quantile(ttfts, q), expected[f"ttft_{name}_s"], outside)
    metrics.append(result.plain("ttft.outside_the_router", 1e3 * outside, "ms, added to what is simulated"))
    usual_s = one.usual_s(sum(each.prompt_tokens for each in trace) // len(trace))
    for name, q in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
        metrics.append(
            result.plain(f"usual_step.{name}", 1e3 * (quantile(usual_s, q) or 0.0), "ms, of all stretches: how the machine wandered")
        )
    work = WorkResult("mixed", f"{len(trace)} requests of {LENGTHS[0][1]} to {LENGTHS[-1][2]} tokens", summarize(seen.records))
    return Result("calibration", configuration, (work,), tuple(metrics), {"twin": one, "simulated": expected})


def _agreement(name: str, real_s: float | None, simulated_s: float | None, outside: float) -> tuple[Metric, ...]:
    expected_s = None if simulated_s is None else simulated_s + outside
    off = None if not real_s or expected_s is None else 100 * abs(expected_s - real_s) / real_s
    return (
        result.at_most(f"simulated_ttft_off.{name}", off, AGREEMENT_MAX, "%"),
        result.plain(f"ttft.{name}.real", None if real_s is None else 1e3 * real_s, "ms"),
        result.plain(f"ttft.{name}.simulated", None if expected_s is None else 1e3 * expected_s, "ms"),
    )


def _banded(name: str, percent: float, band: tuple[float, float], *, judged: bool) -> Metric:
    low, high = band
    bound = f"{low:g} to {high:g}" if high < 100.0 else f">= {low:g}"
    return Metric(name, round(percent, 2), "%", bound, low <= percent <= high if judged else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rate", type=float, help="requests a second, instead of what the replica shows that it bears")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    arguments = ["--replicas", "1", "--queue-time-slo-s", "600", "--debug-decisions", str(KEPT)]
    try:
        with stack.served(arguments) as url:
            trace, seen = uvloop.run(run(url, options.requests, options.rate, options.seed))
    except stack.StackError as error:
        print(error)
        return 1
    rate_per_s = len(trace) / trace[-1].arrival_s
    told = {"serve": " ".join(arguments), "rate": f"{rate_per_s:.3g} req/s", "seed": str(options.seed)}
    drill = report(seen, trace, told)
    result.show(drill)
    return 0 if drill.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
