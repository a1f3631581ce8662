"""Drill: 160 requests of about 400 tokens at once on one replica whose queue-time SLO is 2 s.

At least 8 are served; each answer is 200 or 429 with Retry-After; who is hopeless at arrival hears it within 50 ms (p95, on
the client's clock); the accepted keep the SLO. `python -m bench.drills.overload`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from bench import metrics_page, result, stack
from bench.connection import Target
from bench.load_client import LoadClient, closed_loop
from bench.metrics_page import MetricsPage
from bench.prompt_style import PromptStyle, completion, random_ids
from bench.quantiles import quantile
from bench.record import Outcome, RequestRecord
from bench.result import Result, WorkResult
from bench.summary import summarize
from bench.works import Work, calls_of

REQUESTS = 160
PROMPT_TOKENS = 400
SLO_S = 2.0
AT_ARRIVAL = "queue_time"  # error.code of a refusal decided at arrival
SERVED_MIN = 8
REFUSAL_BOUND_MS = 50.0
SERVE = ("--replicas", "1", "--queue-time-slo-s", f"{SLO_S:g}", "--debug-decisions", "500")


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Body(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


@dataclass(frozen=True, slots=True)
class Overload:
    records: tuple[RequestRecord, ...]
    page: MetricsPage  # what /metrics gained during the burst
    waits_s: tuple[float, ...] = ()  # queue times of the accepted, as the router noted them; empty where it was not asked to

    def of(self, outcome: Outcome) -> list[RequestRecord]:
        return [record for record in self.records if record.outcome is outcome]

    @property
    def without_retry_after(self) -> int:
        """Refusals that do not say when to come back: whole seconds of at least 1, and milliseconds."""
        return sum(
            record.refusal.retry_after_s is None
            or record.refusal.retry_after_s < 1
            or record.refusal.retry_after_s % 1 != 0
            or record.refusal.retry_after_ms is None
            for record in self.of(Outcome.SHED)
        )

    @property
    def reasons(self) -> dict[str, int]:
        return dict(sorted(Counter(reason(record) for record in self.of(Outcome.SHED)).items()))

    @property
    def refusal_p95_ms(self) -> float | None:
        """From sending to the first byte of the answer, of those refused at arrival."""
        times = [
            (record.first_byte_s - record.sent_s) * 1e3
            for record in self.of(Outcome.SHED)
            if reason(record) == AT_ARRIVAL and record.first_byte_s is not None and record.sent_s is not None
        ]
        return quantile(times, 0.95)

    @property
    def queue_time_p95_s(self) -> float | None:
        """Exact where every accepted request's is known.

        Else an upper bound: the lesser of the server's histogram (its bucket's edge) and the time to first token, never less
        than the wait.
        """
        if self.waits_s and len(self.waits_s) == len(self.of(Outcome.COMPLETED)):
            return quantile(self.waits_s, 0.95)
        bounds = [
            self.page.quantile_bound(metrics_page.QUEUE_TIME, 0.95),
            quantile([record.ttft_s for record in self.of(Outcome.COMPLETED) if record.ttft_s is not None], 0.95),
        ]
        return min((bound for bound in bounds if bound is not None), default=None)


def reason(record: RequestRecord) -> str:
    """error.code of a refusal; empty when its body is not of OpenAI's shape."""
    try:
        return str(msgspec.json.decode(record.refusal.body, type=_Body).error.code or "")
    except msgspec.MsgspecError:
        return ""


async def run(url: str, *, requests: int = REQUESTS, output_tokens: int = 32, seed: int = 0) -> Overload:
    """A short calm load first, so that the step-time model has seen the machine; then all at once, on open connections."""
    client = LoadClient(Target.parse(url), timeout_s=120.0)
    style = PromptStyle("smollm2")
    try:
        calm = Work("calm", streams=4, prompt_tokens=PROMPT_TOKENS, output_tokens=16, requests=12)
        await closed_loop(client, calls_of(calm, style, seed), streams=calm.streams)
        await client.open_ahead(requests)
        before, earlier = await asyncio.to_thread(_page, url), await asyncio.to_thread(_decisions, url)
        last = max((one["number"] for one in earlier), default=0)
        draw = random.Random(f"overload/{seed}")
        burst = [completion(random_ids(draw, PROMPT_TOKENS), output_tokens, style) for _ in range(requests)]
        records = await asyncio.gather(*(client.send(call) for call in burst))
        after, told = await asyncio.to_thread(_page, url), await asyncio.to_thread(_decisions, url)
    finally:
        client.close()
    return Overload(tuple(records), after.since(before), waits_s(one for one in told if one["number"] > last))


def waits_s(decisions: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    """Queue times of those that were admitted and had a token."""
    found = ((one["actual"] or {}).get("queue_time_s") for one in decisions if one["verdict"] == "admitted")
    return tuple(wait_s for wait_s in found if wait_s is not None)


def _decisions(url: str) -> list[Mapping[str, Any]]:
    """The last ones; empty where the server does not tell."""
    try:
        return list(json.loads(stack.get_text(f"{url}/debug/decisions"))["data"])
    except OSError:
        return []


def _page(url: str) -> MetricsPage:
    return metrics_page.parse(stack.get_text(f"{url}/metrics"))


def report(outcome: Overload, configuration: dict[str, str]) -> Result:
    completed, shed = len(outcome.of(Outcome.COMPLETED)), len(outcome.of(Outcome.SHED))
    metrics = [
        result.at_least("served", float(completed), SERVED_MIN, "requests"),
        result.at_most("neither_200_nor_429", float(len(outcome.records) - completed - shed), 0, "requests"),
        result.at_most("without_retry_after", float(outcome.without_retry_after), 0, "requests"),
        result.at_most("queue_time_p95", outcome.queue_time_p95_s, SLO_S, "s"),
        result.plain("shed", float(shed), "requests"),
    ]
    if AT_ARRIVAL in outcome.reasons:
        metrics.append(result.at_most("refusal_at_arrival_p95", outcome.refusal_p95_ms, REFUSAL_BOUND_MS, "ms"))
    work = WorkResult("burst", f"{len(outcome.records)} × {PROMPT_TOKENS} tokens at once", summarize(outcome.records))
    return Result("overload", configuration, (work,), tuple(metrics), {"reasons": outcome.reasons})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--output-tokens", type=int, default=32)
    options = parser.parse_args()
    arguments = list(SERVE)
    try:
        with stack.served(arguments) as url:
            outcome = uvloop.run(run(url, requests=options.requests, output_tokens=options.output_tokens))
    except stack.StackError as error:
        print(error)
        return 1
    drill = report(outcome, {"serve": " ".join(arguments), "output_tokens": str(options.output_tokens)})
    result.show(drill)
    return 0 if drill.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
