"""What telling the other ranks a Step costs, and how many bytes: 64 decoding requests, two ranks, loopback.

    python -m bench.step_broadcast [--ranks 2] [--requests 64] [--steps 2000] [--chunk 128]

Each Step is timed from before it is encoded on rank 0 until rank 1 has the arrays that its runner computes with, by the one
monotonic clock of the machine. Steps are 2 ms apart, so that rank 1 sleeps when one comes, as it does in a replica; rank 0 has just made
it. Beside it gloo's broadcast of the same bytes. With --chunk each Step has so many tokens of a prompt beside the decodes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from bench import result
from bench.result import Result
from replica.contract.messages import SamplingParams
from replica.parallel.group import RankGroup, join_store, open_store
from replica.parallel.step_codec import encode_stop
from replica.parallel.step_decoder import StepDecoder
from replica.parallel.step_encoder import StepEncoder
from replica.step import Draw, Row, Step

BOUND_US = 150.0
BYTES_BOUND = 64.0
BLOCK = 16
CONTEXT = 1024  # tokens that each request has already
PROMPT = 4096  # tokens of each prompt, one after the other
APART_S = 0.002
WARM_UP = 50
SECRET = b"of this measurement"
Times = list[tuple[float, float]]  # (received, decoded) of every step, seconds


def steps(count: int, requests: int, chunk: int) -> Iterator[Step]:
    """Decodes at different places of their blocks, as in a running engine: a sixteenth of them takes a new block in each step."""
    draw = Draw(SamplingParams(seed=1, max_tokens=8), 0, (), ())
    blocks = [list(range(n * 1000, n * 1000 + (CONTEXT + n) // BLOCK + 1)) for n in range(requests)]
    prompt_pages = list(range(PROMPT // BLOCK))
    for step in range(count):
        for n, pages in enumerate(blocks):
            if (CONTEXT + n + step) // BLOCK >= len(pages):
                pages.append(pages[-1] + 1)
        rows = [Row(n, (step % 50_000,), CONTEXT + n + step, pages, draw) for n, pages in enumerate(blocks)]
        if chunk:
            prompt, start = divmod(step * chunk, PROMPT // chunk * chunk)
            rows.append(Row(requests + prompt, (7,) * chunk, start, prompt_pages))
        yield Step(step, tuple(rows))


def follow(rank: int, ranks: int, port: int, count: int, size: int, results: Connection) -> None:
    torch.set_num_threads(1)
    group = RankGroup(join_store("127.0.0.1", port, 60.0), rank=rank, size=ranks, secret=SECRET)
    group.meet()
    decoder, times = StepDecoder(BLOCK), []
    while True:
        data = group.receive()
        received_s = time.perf_counter()
        if decoder.decode(data) is None:
            break
        times.append((received_s, time.perf_counter()))
        decoder.prepare()
    buffer = torch.empty(size, dtype=torch.uint8)
    gloo: list[float] = []
    for _ in range(count):
        dist.broadcast(buffer, src=0)
        gloo.append(time.perf_counter())
    results.send((times, gloo))
    group.close()


def lead(ranks: int, requests: int, count: int, chunk: int) -> tuple[list[float], list[float], Times, list[float], list[float], list[int]]:
    """Per step: when it began, when it was encoded; what rank 1 noted; when each broadcast of gloo began and arrived; bytes."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", 60.0)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(1, ranks)]
    size = len(StepEncoder(BLOCK).encode(next(steps(1, requests, chunk))))
    followers = [
        context.Process(target=follow, args=(rank, ranks, store.port, count, size, pipes[rank - 1][1]), daemon=True)
        for rank in range(1, ranks)
    ]
    for follower in followers:
        follower.start()
    group = RankGroup(store, rank=0, size=ranks, secret=SECRET)
    group.meet()
    encoder, began, encoded, sizes = StepEncoder(BLOCK), [], [], []
    planned = steps(count, requests, chunk)
    for _ in range(count):
        time.sleep(APART_S)
        encoder.prepare()  # as in a replica: once it has computed
        step = next(planned)  # only now: rank 0 encodes what it has just planned
        began.append(time.perf_counter())
        data = encoder.encode(step)
        encoded.append(time.perf_counter())
        group.send(data)
        sizes.append(len(data))
    group.send(encode_stop())
    gloo_began = []
    buffer = torch.zeros(size, dtype=torch.uint8)
    for _ in range(count):
        time.sleep(APART_S)
        gloo_began.append(time.perf_counter())
        dist.broadcast(buffer, src=0)
    times, gloo_arrived = [pipe.recv() for pipe, _ in pipes][-1]  # the last one served
    group.close()
    for follower in followers:
        follower.join()
    return began, encoded, times, gloo_began, gloo_arrived, sizes


def report(ranks: int, requests: int, count: int, chunk: int) -> Result:
    began, encoded, times, gloo_began, gloo_arrived, sizes = lead(ranks, requests, count, chunk)
    whole = _us(began, [decoded for _, decoded in times])
    typical = statistics.median(whole)  # the bound is one of decodes
    gloo = _us(gloo_began, gloo_arrived)
    decoding = sizes[WARM_UP:]  # the first carries every page
    return Result(
        "step-broadcast",
        {"ranks": str(ranks), "requests": str(requests), "steps": str(count), "context_tokens": str(CONTEXT), "chunk": str(chunk)},
        metrics=(
            result.plain("step_p50", typical, "us") if chunk else result.at_most("step_p50", typical, BOUND_US, "us"),
            result.plain("step_p90", _quantile(whole, 0.9), "us"),
            result.plain("encode_p50", statistics.median(_us(began, encoded)), "us"),
            result.plain("transfer_p50", statistics.median(_us(encoded, [received for received, _ in times])), "us"),
            result.plain(
                "decode_p50", statistics.median(_us([received for received, _ in times], [decoded for _, decoded in times])), "us"
            ),
            result.plain("gloo_transfer_p50", statistics.median(gloo), "us"),
            result.at_most("bytes_per_request", max(decoding) / requests, BYTES_BOUND, "bytes"),
            result.plain("step_bytes_p50", statistics.median(decoding), "bytes"),
        ),
    )


def _us(begin: Sequence[float], end: Sequence[float]) -> list[float]:
    return [1e6 * (b - a) for a, b in zip(begin, end, strict=True)][WARM_UP:]


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prompt beside the decodes in each step")
    options = parser.parse_args()
    found = report(options.ranks, options.requests, max(options.steps, 2 * WARM_UP), options.chunk)
    result.show(found)
    return 0 if found.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
