"""How long a warm start takes: from the command to /ready, and to the first completion that is answered with 200."""

from __future__ import annotations

import argparse
import time

import uvloop

from bench import result, stack
from bench.connection import Target
from bench.load_client import LoadClient, json_call
from bench.record import Outcome
from bench.result import Result

BOUND_S = 40.0


async def first_answer(url: str) -> bool:
    client = LoadClient(Target.parse(url))
    body = {
        "model": "smollm2",
        "prompt": "The capital of France is",
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        record = await client.send(json_call("/v1/completions", body))
    finally:
        client.close()
    return record.outcome is Outcome.COMPLETED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="the first may compile; the last counts")
    options = parser.parse_args()
    arguments = ["--replicas", str(options.replicas)]
    ready_s: list[float] = []
    answered_s: list[float] = []
    for _ in range(options.repeats):
        start_s = time.monotonic()
        try:
            served = stack.start(arguments)
        except stack.StackError as error:
            print(error)
            return 1
        try:
            answered = uvloop.run(first_answer(served.url))
            ready_s.append(served.start_s)
            answered_s.append(time.monotonic() - start_s)
        finally:
            served.stop()
        if not answered:
            print("the first completion failed")
            return 1
    outcome = Result(
        "start-up",
        {"serve": " ".join(arguments), "repeats": str(options.repeats)},
        metrics=(
            result.at_most("start.first_200", answered_s[-1], BOUND_S, "s"),
            result.plain("start.ready", ready_s[-1], "s"),
            result.plain("start.first_run", answered_s[0], "s"),
        ),
    )
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
