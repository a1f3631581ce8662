"""`make bench`: the works a–e of the comparison table against a whole stack, in a closed loop. A table, and JSON in bench/results/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import uvloop
from rich.console import Console
from rich.table import Table

from bench import result, stack
from bench.connection import Target
from bench.load_client import LoadClient, closed_loop
from bench.prompt_style import PromptStyle
from bench.result import Metric, Result, WorkResult
from bench.summary import summarize
from bench.works import WORKS, Work, calls_of

B_OUTPUT_TOKENS_PER_S_MIN = 156.0


async def measure(
    url: str, works: Sequence[Work], style: PromptStyle, seed: int, console: Console, *, new_connections: bool = False
) -> tuple[WorkResult, ...]:
    """Each work once, after a short warm-up with prompts of its own."""
    client = LoadClient(Target.parse(url), reuse_connections=not new_connections)
    results: list[WorkResult] = []
    try:
        for work in works:
            warm_up = replace(work, name=f"{work.name}-warm-up", requests=min(work.streams, 4), output_tokens=8)
            await closed_loop(client, calls_of(warm_up, style, seed), streams=warm_up.requests)
            with console.status(f"{work.name}: {work.description}"):
                records = await closed_loop(client, calls_of(work, style, seed), streams=work.streams)
            results.append(WorkResult(work.name, work.description, summarize(records)))
    finally:
        client.close()
    return tuple(results)


def table_of(results: tuple[WorkResult, ...]) -> Table:
    table = Table(title="closed loop, streaming, greedy, ignore_eos; output tokens/s, times in ms")
    table.add_column("work", no_wrap=True)
    for heading in ("tok/s", "req/s", "TTFT p50", "p95", "ITL p50", "p95", "e2e p50", "hit %", "ok", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for work in results:
        s = work.summary
        ttft, itl = s.latencies.ttft_ms, s.latencies.itl_ms
        figures = [s.output_tokens_per_s, s.completed_per_s, ttft.p50, ttft.p95, itl.p50, itl.p95, s.latencies.e2e_ms.p50]
        cells = [_cell(figure) for figure in [*figures, s.prefix_hit_percent]]
        table.add_row(f"{work.name}: {work.description}", *cells, f"{s.completed}/{s.requests}", str(s.errors + s.shed))
    return table


def metrics_of(results: tuple[WorkResult, ...], *, bounds: bool) -> tuple[Metric, ...]:
    """What the project promises of these works, when the stack is the one it promises it for."""
    metrics: list[Metric] = []
    for work in results:
        metrics.append(result.at_most(f"{work.name}.failed", float(work.summary.errors + work.summary.shed), 0, "requests"))
        if bounds and work.name == "b":
            speed = work.summary.output_tokens_per_s
            metrics.append(result.at_least("b.output_tokens_per_s", speed, B_OUTPUT_TOKENS_PER_S_MIN, "tokens/s"))
    return tuple(metrics)


def _cell(figure: float | None) -> str:
    if figure is None:
        return "–"
    return f"{figure:.1f}" if figure < 100 else f"{figure:.0f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", help="a running OpenAI-compatible server; without it a stack is started and stopped")
    parser.add_argument("--works", default="a,b,c,d,e", help="which works, by letter")
    parser.add_argument("--quick", action="store_true", help="work b alone")
    parser.add_argument("--model", default="smollm2", help="name to ask for")
    parser.add_argument("--replicas", type=int, default=1, help="of the stack that is started")
    parser.add_argument("--dtype", default="auto", help="of the stack that is started")
    parser.add_argument("--serve-args", default="", help="further arguments of `rantang serve`, in one string")
    parser.add_argument("--text-prompts", action="store_true", help="for servers that take no token ids")
    parser.add_argument("--no-ids", action="store_true", help="do not ask for token ids in the answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    return parser.parse_args()


def chosen_works(letters: str) -> list[Work]:
    """The works named, in the table's order. Raises ValueError with the list for an unknown one."""
    wanted = [letter.strip() for letter in letters.split(",") if letter.strip()]
    known = {work.name: work for work in WORKS}
    unknown = [letter for letter in wanted if letter not in known]
    if unknown or not wanted:
        raise ValueError(f"unknown work {', '.join(unknown) or 'none given'}; there are {', '.join(known)}")
    return [work for work in WORKS if work.name in wanted]


def main() -> int:
    options = parse()
    console = Console() if sys.stdout.isatty() else Console(width=130)
    try:
        works = chosen_works("b" if options.quick else options.works)
    except ValueError as error:
        console.print(f"[red]{error}")
        return 2
    arguments = ["--replicas", str(options.replicas), "--dtype", options.dtype, *options.serve_args.split()]
    style = PromptStyle(options.model, as_text=options.text_prompts, ask_ids=not options.no_ids)
    try:
        console.print("starting the stack …" if options.url is None else f"measuring {options.url}")
        with stack.served(arguments, url=options.url) as url:
            results = uvloop.run(measure(url, works, style, options.seed, console))
    except stack.StackError as error:
        console.print(f"[red]{error}", highlight=False)
        return 1
    configuration = {"serve": "a running server" if options.url else " ".join(arguments), "seed": str(options.seed)}
    outcome = Result("closed-loop", configuration, results, metrics_of(results, bounds=options.url is None and options.replicas == 1))
    console.print(table_of(results))
    for work in results:
        for problem, count in work.summary.problems.items():
            console.print(f"[red]{work.name}: {count} × {problem}")
    console.print(f"written to {result.write(outcome).relative_to(result.ROOT)}")
    return 0 if all(work.summary.completed for work in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
