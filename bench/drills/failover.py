"""Drill: a replica is killed, or frozen, under 24 streams. All move in time, none may be lost, no text changed, no token doubled.

The same prompts run undisturbed first; a stream may differ only from a position on where its two likeliest tokens are
less than 1e-3 nat apart. `python -m bench.drills.failover --how kill|freeze`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from bench import metrics_page, processes, result, stack
from bench.answer import Expectation
from bench.connection import Target
from bench.drills.verdict import Difference, compare, lost_streams, read_scores
from bench.load_client import Call, LoadClient, json_call
from bench.processes import Process
from bench.record import RequestRecord
from bench.result import Result
from bench.stack import Stack

STREAMS = 24
OUTPUT_TOKENS = 64  # the fault comes when a quarter is there; a float32 replica alone on two cores makes some 60 a second
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
MOVED_BOUND_S = {"kill": 1.0, "freeze": 3.0}  # a freeze: max(2 s, 4 × step) + 1 s, with steps under half a second
METRICS_POLL_S = 0.05
REPLACED_TIMEOUT_S = 90.0
UNDER_WAY_TIMEOUT_S = 60.0
POLL_S = 0.02
TOPICS = ("rivers", "bread", "the moon", "old maps", "glass", "winter", "bees", "trains")
OPENINGS = ("A short story about {}: once", "What everyone should know about {} is that", "The history of {} begins")


@dataclass(frozen=True, slots=True)
class Failover:
    """What came of it.

    `moved_after_s`: until the router had moved the last stream: the fault was seen, and all work of the victim is somewhere else.
    `silence_s`: the longest pause between two tokens of any stream that spans or follows the fault: that, and the time in which
    the other replica computes again what the victim had computed of a dozen prompts.
    """

    undisturbed: tuple[RequestRecord, ...]
    disturbed: tuple[RequestRecord, ...]
    differences: tuple[Difference, ...]
    moved_after_s: float | None  # None: none was seen to move
    silence_s: float
    tokens_before: int  # tokens that had reached the client when the fault came
    replaced_after_s: float | None  # None: no new replica within the time limit

    @property
    def lost_streams(self) -> dict[str, str]:
        """What became of each stream that did not complete, by its number."""
        return lost_streams(self.disturbed)

    @property
    def lost(self) -> int:
        return len(self.lost_streams)

    @property
    def changed(self) -> int:
        return sum(not difference.excused for difference in self.differences)

    @property
    def doubled(self) -> int:
        """Streams that brought more tokens than were asked for."""
        return sum(
            disturbed.tokens_seen > undisturbed.tokens_seen for undisturbed, disturbed in zip(self.undisturbed, self.disturbed, strict=True)
        )


def calls(output_tokens: int, streams: int = STREAMS) -> list[Call]:
    """Greedy streams with different prompts, each reporting ids and its two likeliest tokens."""
    prompts = [opening.format(topic) for opening in OPENINGS for topic in TOPICS]
    expect = Expectation(completion_tokens=output_tokens, keep=True)
    told = [prompts[i] if i < len(prompts) else f"Part {i // len(prompts)}. {prompts[i % len(prompts)]}" for i in range(streams)]
    return [json_call("/v1/completions", _body(prompt, output_tokens), expect) for prompt in told]


async def run(served: Stack, how: str, output_tokens: int = OUTPUT_TOKENS) -> Failover:
    """Needs a stack of at least two replicas; waits until it is whole again."""
    return await disturb(served, how, await undisturbed(served.url, output_tokens), output_tokens)


async def undisturbed(url: str, output_tokens: int = OUTPUT_TOKENS) -> list[RequestRecord]:
    """What every stream brings while nothing happens: the measure of any number of faults."""
    client = LoadClient(Target.parse(url))
    try:
        return await asyncio.gather(*(client.send(call) for call in calls(output_tokens)))
    finally:
        client.close()


async def disturb(served: Stack, how: str, undisturbed: Sequence[RequestRecord], output_tokens: int = OUTPUT_TOKENS) -> Failover:
    """One fault of a stack, as `run` does, against streams that were undisturbed on it before."""
    client = LoadClient(Target.parse(served.url))
    try:
        return await one_round(served, client, how, undisturbed, output_tokens)
    finally:
        client.close()


async def one_round(served: Stack, client: LoadClient, how: str, undisturbed: Sequence[RequestRecord], output_tokens: int) -> Failover:
    """As many streams as `undisturbed` has, and one replica disturbed when they have brought a quarter of their tokens."""
    streams = len(undisturbed)
    replicas = len(served.of_role("replica"))
    if replicas < 2:
        raise ValueError(f"the drill needs two replicas, found {replicas} by process title")
    earlier = client.tokens_received
    running = [asyncio.create_task(client.send(call)) for call in calls(output_tokens, streams)]
    tokens_before = await under_way(client, earlier, streams * output_tokens // 4)
    victim = served.of_role("replica")[0]
    moved_before = await moves(served.url)
    fault_s = time.perf_counter()
    moving = asyncio.create_task(last_move(served.url, moved_before))
    os.kill(victim.pid, SIGNALS[how])
    try:
        disturbed = await asyncio.gather(*running)
        moving.cancel()
        moved_s = await moving
        replaced = await _replaced(served, victim, replicas)
    finally:
        if processes.alive([victim]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)
    return Failover(
        tuple(undisturbed),
        tuple(disturbed),
        differences(undisturbed, disturbed),
        moved_s - fault_s if moved_s is not None else None,
        max((silence_s(record, fault_s) for record in disturbed), default=0.0),
        tokens_before,
        replaced - fault_s if replaced is not None else None,
    )


def differences(undisturbed: Sequence[RequestRecord], disturbed: Sequence[RequestRecord]) -> tuple[Difference, ...]:
    found = [
        compare(
            i,
            before.answer.token_ids.get(0, []),
            after.answer.token_ids.get(0, []),
            read_scores(before.answer.logprobs.get(0, [])).gaps_nat,
        )
        for i, (before, after) in enumerate(zip(undisturbed, disturbed, strict=True))
    ]
    return tuple(difference for difference in found if difference is not None)


def silence_s(record: RequestRecord, fault_s: float) -> float:
    """The longest time without a token that ended after the fault."""
    times = [record.scheduled_s, *record.chunk_times_s]
    return max((after - before for before, after in itertools.pairwise(times) if after > fault_s), default=0.0)


async def under_way(client: LoadClient, earlier: int, wanted: int) -> int:
    """Waits until the streams have brought `wanted` tokens together; how many they have."""
    for _ in range(int(UNDER_WAY_TIMEOUT_S / POLL_S)):
        if client.tokens_received - earlier >= wanted:
            break
        await asyncio.sleep(POLL_S)
    return client.tokens_received - earlier


async def last_move(url: str, before: float) -> float | None:
    """When the router's count of moved streams was last seen to grow, until cancelled. None: it has not grown beyond `before`."""
    last: float | None = None
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            count = await moves(url)
            if count > before:
                last = time.perf_counter()
            before = count
            await asyncio.sleep(METRICS_POLL_S)
    return last


async def moves(url: str) -> float:
    page = metrics_page.parse(await asyncio.to_thread(stack.get_text, f"{url}/metrics"))
    return page.values.get(metrics_page.MOVES, 0.0)


async def _replaced(served: Stack, victim: Process, replicas: int) -> float | None:
    """When as many other replicas run as before, and the stack is ready."""
    deadline_s = time.perf_counter() + REPLACED_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        others = [process for process in served.of_role("replica") if process.pid != victim.pid]
        if len(others) >= replicas and await asyncio.to_thread(stack.is_ready, served.url):
            return time.perf_counter()
        await asyncio.sleep(0.5)
    return None


def _body(prompt: str, output_tokens: int) -> dict[str, object]:
    return {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def report(outcome: Failover, how: str, configuration: dict[str, str]) -> Result:
    metrics = [
        result.at_most("lost", float(outcome.lost), 0, "streams"),
        result.at_most("changed", float(outcome.changed), 0, "streams"),
        result.at_most("doubled", float(outcome.doubled), 0, "streams"),
        result.at_least("tokens_before_fault", float(outcome.tokens_before), 1, "tokens"),
        result.plain("excused_near_ties", float(len(outcome.differences) - outcome.changed), "streams"),
        result.plain("replaced_after", outcome.replaced_after_s, "s"),
    ]
    metrics += [
        result.at_most("moved_after", outcome.moved_after_s, MOVED_BOUND_S[how], "s"),
        result.plain("silence", outcome.silence_s, "s"),
    ]
    return Result(f"failover-{how}", configuration, metrics=tuple(metrics), details={"lost": outcome.lost_streams})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=sorted(SIGNALS), default="kill")
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
    options = parser.parse_args()
    arguments = ["--replicas", "2", "--dtype", "float32", "--queue-time-slo-s", "120"]  # no refusal may pass for a loss
    try:
        served = stack.start(arguments)
    except stack.StackError as error:
        print(error)
        return 1
    try:
        outcome = uvloop.run(run(served, options.how, options.output_tokens))
    finally:
        served.stop()
    drill = report(outcome, options.how, {"serve": " ".join(arguments), "output_tokens": str(options.output_tokens)})
    result.show(drill)
    return 0 if drill.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
