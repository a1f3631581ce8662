"""What one router process costs, engines mocked, on a core of its own: `python -m bench.router_cost`.

CPU per request at 64 replicas, of a prompt of 4,000 ids (checked, hashed, placed, its blocks indexed) and of a chat of 2 kB
whose tokenizing is measured beside it and subtracted; CPU per stream of 64 tokens at two replicas, unpaced, 32 at once; and
the time a router adds at 200 requests a second, against the same client on a plain mock server. The CPU is that of the
router's whole process, HTTP and link included, less what it uses when nothing is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import uvloop

from bench import result
from bench.answer import Expectation
from bench.arrivals import evenly
from bench.connection import Target
from bench.load_client import Call, LoadClient, closed_loop, json_call, open_loop
from bench.prompt_style import PromptStyle, completion, random_ids
from bench.prompt_words import text_of
from bench.quantiles import quantile
from bench.record import Outcome, RequestRecord
from bench.result import ROOT, Metric, Result
from replica.contract.model_files import resolve
from router.served_model import load_served_model
from router.text.chat_template import Conversation

PROMPT_TOKENS = 4_000
CHAT_BYTES = 2_000
REPLICAS = 64
REQUEST_US_MAX = 250.0
STREAMS = 32
STREAM_TOKENS = 64
STREAM_US_MAX = 600.0
RATE_PER_S = 200.0
ADDED_MS_MAX = 0.8
IDLE_S = 3.0
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a run of requests: CPU of the router's process, idle load taken off."""

    cpu_us: float  # per request
    answered: int
    asked: int
    events: float  # that carried tokens, per request


def cpu_s(pid: int) -> float:
    """CPU of all threads that live, by the scheduler's own clock: finer than the ticks of /proc/PID/stat."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextlib.contextmanager
def process(*command: str, core: int) -> Iterator[tuple[int, list[int]]]:
    """Its pid, and the numbers it prints first."""
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        try:
            os.sched_setaffinity(child.pid, [core])
            yield child.pid, _numbers(child.stdout.readline())
        finally:
            child.terminate()


def _numbers(line: str) -> list[int]:
    """Ports, as bare numbers or at the end of an address."""
    return [int(word.rsplit(":", 1)[-1]) for word in line.split() if word.rsplit(":", 1)[-1].isdigit()]


@contextlib.contextmanager
def router(replicas: int, cores: Sequence[int], *options: str) -> Iterator[tuple[int, str]]:
    """Pid and URL of a router of so many mock replicas (`options`: theirs); it has the first core, all else the last."""
    with contextlib.ExitStack() as both:
        _, ports = both.enter_context(process("bench.link_mock", "--replicas", str(replicas), *options, core=cores[-1]))
        pid, port = both.enter_context(process("bench.router_process", *map(str, ports), core=cores[0]))
        yield pid, f"http://127.0.0.1:{port[0]}"


async def cost(pid: int, url: str, calls: Sequence[Call], streams: int) -> Cost:
    """The second half of `calls` counts; the first warms up."""
    client = LoadClient(Target.parse(url))
    half = len(calls) // 2
    try:
        await client.open_ahead(streams)
        await closed_loop(client, calls[:half], streams=streams)
        await asyncio.sleep(0.5)
        before_s, began_s = cpu_s(pid), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        idle = (cpu_s(pid) - before_s) / (time.perf_counter() - began_s)
        before_s, began_s = cpu_s(pid), time.perf_counter()
        records = await closed_loop(client, calls[half:], streams=streams)
        used_s = cpu_s(pid) - before_s - idle * (time.perf_counter() - began_s)
    finally:
        client.close()
    good = [record for record in records if record.outcome is Outcome.COMPLETED]
    events = sum(len(record.chunk_times_s) for record in good) / max(1, len(good))
    return Cost(1e6 * used_s / len(records), len(good), len(records), events)


async def ttft_p50_ms(url: str, calls: Sequence[Call]) -> float:
    client = LoadClient(Target.parse(url))
    try:
        await client.open_ahead(AT_ONCE)
        records: list[RequestRecord] = await open_loop(client, calls, evenly(RATE_PER_S, len(calls)))
    finally:
        client.close()
    middle = quantile([record.ttft_s for record in records[len(records) // 4 :] if record.ttft_s is not None], 0.5)
    assert middle is not None, "nothing was answered"
    return 1e3 * middle


def plain(call: Call) -> Call:
    """The same, answered whole and without the ids of prompt and answer: to write 4,000 of them is no part of what is asked for."""
    apart = ("stream", "stream_options", "return_token_ids")
    body = {name: value for name, value in msgspec.json.decode(call.body).items() if name not in apart}
    return replace(call, body=msgspec.json.encode(body), expect=replace(call.expect, stream=False))


def id_prompts(count: int, tokens: int, output_tokens: int, model: str = "smollm2") -> list[Call]:
    draw = random.Random(f"router-cost/{tokens}")
    return [completion(random_ids(draw, tokens), output_tokens, PromptStyle(model)) for _ in range(count)]


def chats(count: int) -> list[Call]:
    body = {"model": "smollm2", "max_tokens": 1, "ignore_eos": True}
    return [
        json_call("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}, Expectation(stream=False))
        for text in chat_texts(count)
    ]


def chat_texts(count: int) -> list[str]:
    draw = random.Random("router-cost/chat")
    return [text_of(random_ids(draw, CHAT_BYTES // 2))[:CHAT_BYTES] for _ in range(count)]


def tokenizing_us(texts: Sequence[str]) -> float:
    """CPU per chat of the tokenizer alone, the template rendered before."""
    files = resolve("smollm2", None, weights=False)
    model = load_served_model("smollm2", files.gguf if files.kind == "gguf" else files.directory)
    assert model.template is not None
    rendered = [
        model.template.render(Conversation([{"role": "user", "content": text}], True, False, {}), model.tokenizer) for text in texts
    ]
    began_s = time.process_time()
    for each in rendered:
        model.tokenizer.encode_guarded(each.text, each.guard)
    return 1e6 * (time.process_time() - began_s) / len(rendered)


async def per_request(cores: Sequence[int], requests: int) -> tuple[Cost, Cost]:
    """Of a long prompt, and of a chat with its tokenizing."""
    with router(REPLICAS, cores) as (pid, url):
        prompts = [plain(call) for call in id_prompts(2 * requests, PROMPT_TOKENS, 1)]
        return await cost(pid, url, prompts, AT_ONCE), await cost(pid, url, chats(2 * requests), AT_ONCE)


async def streaming(cores: Sequence[int], streams: int, seconds: float) -> tuple[Cost, float, float]:
    """Cost of a stream, and the median time to its first token through the router and without one, ms."""
    with router(2, cores) as (pid, url):
        each = await cost(pid, url, id_prompts(2 * streams, 32, STREAM_TOKENS), STREAMS)
        count = int(RATE_PER_S * seconds)
        with process("bench.mock_openai", core=cores[-1]) as (_, port):
            direct = f"http://127.0.0.1:{port[0]}"
            through_ms, direct_ms = [], []
            for _ in range(2):  # turn by turn
                direct_ms.append(await ttft_p50_ms(direct, id_prompts(count, 32, 4, "mock")))
                through_ms.append(await ttft_p50_ms(url, id_prompts(count, 32, 4)))
        return each, min(through_ms), min(direct_ms)


def report(prompt: Cost, chat: Cost, tokenizing: float, stream: Cost, through_ms: float, direct_ms: float) -> Result:
    unanswered = sum(each.asked - each.answered for each in (prompt, chat, stream))
    metrics: list[Metric] = [
        result.at_most("unanswered", float(unanswered), 0, "requests"),
        result.at_most("cpu_per_request.4000_token_prompt", prompt.cpu_us, REQUEST_US_MAX, "us"),
        result.at_most("cpu_per_request.2_kB_chat", chat.cpu_us - tokenizing, REQUEST_US_MAX, "us, tokenizing apart"),
        result.plain("tokenizing.2_kB_chat", tokenizing, "us"),
        result.at_most("cpu_per_stream.64_tokens", stream.cpu_us, STREAM_US_MAX, "us"),
        result.plain("events_per_stream", stream.events, "events with tokens"),
        result.at_most("added_ttft.p50", through_ms - direct_ms, ADDED_MS_MAX, "ms at 200 req/s"),
        result.plain("ttft.p50.direct", direct_ms, "ms"),
    ]
    return Result("router-cost", {"replicas": f"{REPLICAS} and 2, mocks of the link", "streams": str(STREAMS)}, metrics=tuple(metrics))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000, help="of each kind, after as many to warm up")
    parser.add_argument("--streams", type=int, default=2000, help="after as many to warm up")
    parser.add_argument("--seconds", type=float, default=10.0, help="at 200 requests a second, twice each")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    prompt, chat = uvloop.run(per_request(cores, options.requests))
    stream, through_ms, direct_ms = uvloop.run(streaming(cores, options.streams, options.seconds))
    outcome = report(prompt, chat, tokenizing_us(chat_texts(500)), stream, through_ms, direct_ms)
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
