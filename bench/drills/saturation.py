"""Drill: the promise at twice the load that one replica can bear. `python -m bench.drills.saturation`.

A request is promised its first token within 1 s + 3 × the time its prompt takes on an idle replica, by the headers it is sent
with. What the replica bears is measured by a closed loop; then requests arrive at random, once as many and once twice as many.
Of those accepted at twice the load at least 97 % must keep the promise, and as many must be served well as at saturation (95 %).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import uvloop

from bench import result, stack
from bench.arrivals import poisson
from bench.connection import Target
from bench.load_client import Call, LoadClient, closed_loop, open_loop
from bench.prompt_style import PromptStyle, completion, random_ids
from bench.quantiles import quantile
from bench.record import Outcome, RequestRecord
from bench.result import Result, WorkResult
from bench.summary import summarize

LENGTHS = (64, 128, 256, 384, 512)
OUTPUT_TOKENS = 32
STREAMS = 16
BASE_S = 1.0
TIMES_PREFILL = 3.0
KEPT_MIN = 97.0
GOODPUT_MIN = 0.95
STYLE = PromptStyle("smollm2")


@dataclass(frozen=True, slots=True)
class Stretch:
    """One open loop: its offered load, and the promise each request was sent with."""

    rate_per_s: float
    seconds: float
    records: tuple[RequestRecord, ...]
    within_s: tuple[float, ...]

    @property
    def accepted(self) -> int:
        return sum(record.outcome is not Outcome.SHED for record in self.records)

    @property
    def kept(self) -> int:
        """Completed, and the first token came in time."""
        return sum(
            record.outcome is Outcome.COMPLETED and record.ttft_s is not None and record.ttft_s <= within_s
            for record, within_s in zip(self.records, self.within_s, strict=True)
        )

    @property
    def goodput_per_s(self) -> float:
        return self.kept / self.seconds


@dataclass(frozen=True, slots=True)
class Saturation:
    prefill_s: dict[int, float]  # by prompt length, of a lone request
    bears_per_s: float
    once: Stretch
    twice: Stretch


async def run(url: str, seconds: float, seed: int) -> Saturation:
    client = LoadClient(Target.parse(url), timeout_s=120.0)
    draw = random.Random(f"saturation/{seed}")
    try:
        await closed_loop(client, mixed(draw, 2 * STREAMS), streams=STREAMS)  # the step-time model sees the machine
        prefill_s = {length: await lone_ttft_s(client, draw, length) for length in LENGTHS}
        bears_per_s = await saturate(client, draw, seconds / 2)
        once = await stretch(client, draw, bears_per_s, seconds, prefill_s, seed)
        twice = await stretch(client, draw, 2 * bears_per_s, seconds, prefill_s, seed + 1)
    finally:
        client.close()
    return Saturation(prefill_s, bears_per_s, once, twice)


def mixed(draw: random.Random, count: int) -> list[Call]:
    return [completion(random_ids(draw, draw.choice(LENGTHS)), OUTPUT_TOKENS, STYLE) for _ in range(count)]


async def lone_ttft_s(client: LoadClient, draw: random.Random, length: int) -> float:
    records = [await client.send(completion(random_ids(draw, length), 2, STYLE)) for _ in range(5)]
    middle = quantile([record.ttft_s for record in records if record.ttft_s is not None], 0.5)
    assert middle is not None, "a lone request had no answer"
    return middle


async def saturate(client: LoadClient, draw: random.Random, seconds: float) -> float:
    """Requests a second of a closed loop, of which the first and the last few are left out."""
    first = await closed_loop(client, mixed(draw, 2 * STREAMS), streams=STREAMS)
    per_s = summarize(first).completed_per_s
    records = await closed_loop(client, mixed(draw, max(4 * STREAMS, int(per_s * seconds))), streams=STREAMS)
    ends = sorted(record.end_s for record in records if record.end_s is not None)[STREAMS:-STREAMS]
    return (len(ends) - 1) / (ends[-1] - ends[0])


async def stretch(
    client: LoadClient, draw: random.Random, rate_per_s: float, seconds: float, prefill_s: dict[int, float], seed: int
) -> Stretch:
    count = max(1, int(rate_per_s * seconds))
    calls, within = [], []
    for _ in range(count):
        length = draw.choice(LENGTHS)
        within_s = BASE_S + TIMES_PREFILL * prefill_s[length]
        milliseconds = f"{1e3 * within_s:.0f}"
        headers = (("X-TTFT-SLO-Ms", milliseconds), ("X-Queue-Time-SLO-Ms", milliseconds))
        calls.append(replace(completion(random_ids(draw, length), OUTPUT_TOKENS, STYLE), headers=headers))
        within.append(within_s)
    records = await open_loop(client, calls, poisson(rate_per_s, count, seed))
    return Stretch(rate_per_s, seconds, tuple(records), tuple(within))


def report(seen: Saturation, configuration: dict[str, str]) -> Result:
    once, twice = seen.once, seen.twice
    kept = 100 * twice.kept / twice.accepted if twice.accepted else None
    ratio = twice.goodput_per_s / once.goodput_per_s if once.kept else None
    metrics = (
        result.plain("saturation", seen.bears_per_s, "req/s"),
        *(result.plain(f"lone_ttft.{length}", 1e3 * seconds, "ms") for length, seconds in seen.prefill_s.items()),
        result.at_least("kept.twice", kept, KEPT_MIN, "% of the accepted"),
        result.plain("kept.once", 100 * once.kept / once.accepted if once.accepted else None, "% of the accepted"),
        result.plain("goodput.once", once.goodput_per_s, "req/s"),
        result.plain("goodput.twice", twice.goodput_per_s, "req/s"),
        result.at_least("goodput.twice_over_once", ratio, GOODPUT_MIN, "times"),
        result.plain("shed.twice", 100 * (1 - twice.accepted / len(twice.records)), "%"),
        result.at_most("failed", float(_failed([*once.records, *twice.records])), 0, "requests"),
    )
    works = tuple(
        WorkResult(name, f"{each.rate_per_s:.2f} req/s", summarize(each.records)) for name, each in (("once", once), ("twice", twice))
    )
    return Result("saturation", configuration, works, metrics)


def _failed(records: Sequence[RequestRecord]) -> int:
    return sum(record.outcome not in (Outcome.COMPLETED, Outcome.SHED) for record in records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each open loop")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    arguments = ["--replicas", "1"]
    try:
        with stack.served(arguments) as url:
            seen = uvloop.run(run(url, options.seconds, options.seed))
    except stack.StackError as error:
        print(error)
        return 1
    drill = report(seen, {"serve": " ".join(arguments), "seconds": f"{options.seconds:g}"})
    result.show(drill)
    return 0 if drill.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
