"""Drill: 20 rounds of 200 streams with one of two replicas killed in each. `python -m bench.drills.rounds`.

No stream may be lost or doubled; its text is that of the undisturbed run, or first differs where its two likeliest tokens are
less than 1e-3 nat apart. The next round begins when the killed replica is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

import uvloop

from bench import result, stack
from bench.connection import Target
from bench.drills.failover import Failover, calls, one_round
from bench.load_client import LoadClient
from bench.result import Result
from bench.stack import Stack

ROUNDS = 20
STREAMS = 200


async def run(served: Stack, *, rounds: int, streams: int, output_tokens: int, limit_s: float) -> list[Failover]:
    """Those that began within the limit."""
    client = LoadClient(Target.parse(served.url))
    began_s = time.perf_counter()
    done: list[Failover] = []
    try:
        undisturbed = await asyncio.gather(*(client.send(call) for call in calls(output_tokens, streams)))
        while len(done) < rounds and time.perf_counter() - began_s < limit_s:
            done.append(await one_round(served, client, "kill", undisturbed, output_tokens))
            told = done[-1]
            print(
                f"round {len(done)}: {told.lost} lost, {told.changed} changed, {told.doubled} doubled,"
                f" moved {told.moved_after_s}, whole again {told.replaced_after_s}",
                flush=True,
            )
    finally:
        client.close()
    return done


def report(done: Sequence[Failover], rounds: int, configuration: dict[str, str]) -> Result:
    moved = [one.moved_after_s for one in done if one.moved_after_s is not None]
    metrics = (
        result.at_least("rounds", float(len(done)), rounds, "rounds"),
        result.at_least("rounds_with_moves", float(len(moved)), rounds, "rounds"),
        result.at_most("lost", float(sum(one.lost for one in done)), 0, "streams"),
        result.at_most("changed", float(sum(one.changed for one in done)), 0, "streams"),
        result.at_most("doubled", float(sum(one.doubled for one in done)), 0, "streams"),
        result.plain("excused_near_ties", float(sum(len(one.differences) - one.changed for one in done)), "streams"),
        result.plain("moved_after.most", max(moved, default=None), "s"),
        result.plain("streams", float(sum(len(one.disturbed) for one in done)), "streams"),
    )
    return Result("failover-rounds", configuration, metrics=metrics, details={"lost": [one.lost_streams for one in done]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no round begins after it")
    options = parser.parse_args()
    arguments = ["--replicas", "2", "--dtype", options.dtype, "--queue-time-slo-s", "120"]  # no refusal may pass for a loss
    try:
        served = stack.start(arguments)
    except stack.StackError as error:
        print(error)
        return 1
    try:
        done = uvloop.run(
            run(served, rounds=options.rounds, streams=options.streams, output_tokens=options.output_tokens, limit_s=options.limit_s)
        )
    finally:
        served.stop()
    told = {"serve": " ".join(arguments), "streams": str(options.streams), "output_tokens": str(options.output_tokens)}
    drill = report(done, options.rounds, told)
    result.show(drill)
    return 0 if drill.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
