"""Memory of the whole stack, by role: proportional set size of every process, idle and after load."""

from __future__ import annotations

import argparse

import uvloop

from bench import processes, result, stack
from bench.connection import Target
from bench.load_client import LoadClient, closed_loop
from bench.prompt_style import PromptStyle
from bench.result import Metric, Result
from bench.stack import Stack
from bench.works import Work, calls_of

BOUND_GIB = 4.0
LOAD = Work("memory", streams=32, prompt_tokens=512, output_tokens=32, requests=64)


async def exercise(url: str) -> None:
    """Enough work to touch what a busy server touches."""
    client = LoadClient(Target.parse(url))
    try:
        await closed_loop(client, calls_of(LOAD, PromptStyle("smollm2"), 0), streams=LOAD.streams)
    finally:
        client.close()


def memory_metrics(when: str, pss: dict[str, int]) -> list[Metric]:
    """PSS by role in MiB, and the sum against its bound."""
    total_gib = sum(pss.values()) / 2**30 if pss else None
    return [
        result.at_most(f"pss.{when}.all", total_gib, BOUND_GIB, "GiB"),
        *(result.plain(f"pss.{when}.{role}", size / 2**20, "MiB") for role, size in pss.items()),
    ]


def measure(served: Stack, *, load: bool) -> tuple[Metric, ...]:
    metrics = memory_metrics("idle", processes.proportional_memory_bytes(served.processes()))
    if load:
        uvloop.run(exercise(served.url))
        metrics += memory_metrics("after_load", processes.proportional_memory_bytes(served.processes()))
    return tuple(metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--no-load", action="store_true", help="only the idle stack")
    options = parser.parse_args()
    arguments = ["--replicas", str(options.replicas)]
    try:
        served = stack.start(arguments)
    except stack.StackError as error:
        print(error)
        return 1
    try:
        metrics = measure(served, load=not options.no_load)
    finally:
        served.stop()
    outcome = Result("memory", {"serve": " ".join(arguments)}, metrics=metrics)
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
