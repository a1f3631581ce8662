"""Load of one shape against any OpenAI-compatible server: `python -m bench.load URL --streams 32` or `--rate 5`.

With --streams the loop is closed: so many clients, each asking again when its last answer ended. With --rate it is open:
Poisson arrivals, whatever the server does, and latencies count from when a request was due.
"""

from __future__ import annotations

import argparse

import uvloop

from bench import result
from bench.arrivals import poisson
from bench.connection import Target
from bench.load_client import LoadClient, closed_loop, open_loop
from bench.result import Metric, Result, WorkResult
from bench.summary import Summary, summarize
from bench.workload import PromptStyle, Work, calls_of


async def measure(client: LoadClient, work: Work, style: PromptStyle, rate_per_s: float | None, seed: int) -> Summary:
    calls = calls_of(work, style, seed)
    try:
        if rate_per_s is None:
            return summarize(await closed_loop(client, calls, streams=work.streams))
        return summarize(await open_loop(client, calls, poisson(rate_per_s, work.requests, seed)))
    finally:
        client.close()


def metrics_of(s: Summary) -> tuple[Metric, ...]:
    times = s.latencies
    return (
        result.plain("completed", float(s.completed), "requests"),
        result.plain("shed", float(s.shed), "requests"),
        result.at_most("errors", float(s.errors), 0, "requests"),
        result.plain("completed_per_s", s.completed_per_s, "requests/s"),
        result.plain("output_tokens_per_s", s.output_tokens_per_s, "tokens/s"),
        result.plain("ttft.p50", times.ttft_ms.p50, "ms"),
        result.plain("ttft.p95", times.ttft_ms.p95, "ms"),
        result.plain("itl.p50", times.itl_ms.p50, "ms"),
        result.plain("itl.p95", times.itl_ms.p95, "ms"),
        result.plain("e2e.p50", times.e2e_ms.p50, "ms"),
        result.plain("e2e.p95", times.e2e_ms.p95, "ms"),
        result.plain("prefix_hit", s.prefix_hit_percent, "%"),
        result.plain("send_lag.p99", times.send_lag_ms.p99, "ms"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--streams", type=int, help="closed loop")
    shape.add_argument("--rate", type=float, help="open loop, requests per second")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--shared-tokens", type=int, default=0, help="common prefix of all prompts")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--new-connections", action="store_true", help="one for every request")
    parser.add_argument("--text-prompts", action="store_true", help="for servers that take no token ids")
    parser.add_argument("--no-ids", action="store_true", help="do not ask for token ids in the answer")
    parser.add_argument("--api-key", default="")
    options = parser.parse_args()
    work = Work("load", options.streams or 0, options.prompt_tokens, options.output_tokens, options.requests, options.shared_tokens)
    style = PromptStyle(options.model, options.text_prompts, not options.no_ids)
    try:
        target = Target.parse(options.url, options.api_key)
    except ValueError as error:
        parser.error(str(error))
    client = LoadClient(target, timeout_s=options.timeout_s, reuse_connections=not options.new_connections)
    summary = uvloop.run(measure(client, work, style, options.rate, options.seed))
    shape_text = f"{options.rate:g} requests/s" if options.rate else work.description
    configuration = {"shape": shape_text, "seed": str(options.seed)}
    outcome = Result("load", configuration, (WorkResult("load", shape_text, summary),), metrics_of(summary))
    result.show(outcome)
    for problem, count in summary.problems.items():
        print(f"{count} × {problem}")
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
