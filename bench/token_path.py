"""The path of a token: CPU µs per streamed token of router + link + HAProxy, with the engine mocked.

32 streams at 50 tokens/s each. The CPU that the same processes use when nothing is asked of them is measured first and
subtracted. The replicas' processes count whole: with a mock runner they are the link's server and the scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from bench import processes, result, stack
from bench.connection import Target
from bench.load_client import LoadClient, closed_loop
from bench.processes import Process
from bench.prompt_style import PromptStyle
from bench.result import Result, WorkResult
from bench.stack import Stack
from bench.summary import Summary, summarize
from bench.works import Work, calls_of

BOUND_US = 200.0
PATH_ROLES = ("router", "replica", "haproxy", "proxy")  # Serve's own proxy should use nothing: tokens are not to pass through it


@dataclass(frozen=True, slots=True)
class Window:
    """What a stretch of time cost: CPU seconds by role, wall seconds, tokens that reached the client."""

    cpu_s: dict[str, float]
    wall_s: float
    tokens: int

    def per_s(self) -> dict[str, float]:
        return {role: cpu_s / self.wall_s for role, cpu_s in self.cpu_s.items()}


async def window(family: Callable[[], list[Process]], duration_s: float, tokens: Callable[[], int]) -> Window:
    members = family()
    before, start_s, first = processes.usage(members), time.perf_counter(), tokens()
    await asyncio.sleep(duration_s)
    after = processes.usage(members)
    return Window(after.since(before), time.perf_counter() - start_s, tokens() - first)


def microseconds_per_token(idle: Window, busy: Window) -> dict[str, float]:
    """By role, idle load subtracted. Empty when no token came."""
    if not busy.tokens:
        return {}
    rest = idle.per_s()
    return {role: 1e6 * (cpu_s - rest.get(role, 0.0) * busy.wall_s) / busy.tokens for role, cpu_s in busy.cpu_s.items()}


async def measure(served: Stack, *, streams: int, tokens_per_s: float, duration_s: float) -> tuple[Window, Window, Summary]:
    """(idle, busy, the streams' summary). The streams outlast the window on both sides."""
    lead_s = 3.0
    first = LoadClient(Target.parse(served.url))
    warm_up = calls_of(Work("warm-up", streams, 32, 20, streams), PromptStyle("smollm2"), 0)
    await closed_loop(first, warm_up, streams=streams)
    first.close()
    client = LoadClient(Target.parse(served.url))  # new connections: old ones may outlive a reload of HAProxy on their old way
    try:
        await asyncio.sleep(5.0)
        idle = await window(served.processes, duration_s, lambda: 0)
        output_tokens = int(tokens_per_s * (duration_s + 2 * lead_s))
        work = Work("path", streams, 32, output_tokens, streams)
        load = asyncio.create_task(closed_loop(client, calls_of(work, PromptStyle("smollm2"), 1), streams=streams))
        await asyncio.sleep(lead_s)
        busy = await window(served.processes, duration_s, lambda: client.tokens_received)
        return idle, busy, summarize(await load)
    finally:
        client.close()


def report(idle: Window, busy: Window, summary: Summary, configuration: dict[str, str]) -> Result:
    by_role = microseconds_per_token(idle, busy)
    path = [by_role[role] for role in PATH_ROLES if role in by_role]
    total = sum(path) if "router" in by_role and "replica" in by_role else None
    metrics = [
        result.at_most("cpu_per_token.path", total, BOUND_US, "us"),
        *(result.plain(f"cpu_per_token.{role}", value, "us") for role, value in by_role.items()),
        *(result.plain(f"idle_cpu.{role}", 100 * value, "% of a core") for role, value in idle.per_s().items()),
        result.plain("tokens_per_s", busy.tokens / busy.wall_s, "tokens/s"),
    ]
    return Result("token-path", configuration, (WorkResult("path", "streams of the mocked engine", summary),), tuple(metrics))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of one stream")
    parser.add_argument("--duration-s", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    arguments = ["--replicas", str(options.replicas), "--runner", "mock", "--mock-step-ms", f"{1e3 / options.tokens_per_s:g}"]
    try:
        served = stack.start(arguments)
    except stack.StackError as error:
        print(error)
        return 1
    try:
        measured = measure(served, streams=options.streams, tokens_per_s=options.tokens_per_s, duration_s=options.duration_s)
        idle, busy, summary = uvloop.run(measured)
    finally:
        served.stop()
    outcome = report(idle, busy, summary, {"serve": " ".join(arguments), "streams": str(options.streams)})
    result.show(outcome)
    return 0 if outcome.holds and summary.errors == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
