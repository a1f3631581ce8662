"""A real engine behind the link, and routers that submit, cancel, ask and vanish as they like, all at once.

Every router follows the KV events: no sequence number may be missing, and every snapshot must be what it knows already.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import msgspec
import pytest

from replica.block_pool import BlockPool
from replica.config import EngineConfig
from replica.contract.messages import (
    Cancel,
    EngineLimits,
    FinishReason,
    Frame,
    GenerateRequest,
    Snapshot,
    StepTimeCoefficients,
    Stored,
    Submit,
    TokenDelta,
    WantSnapshot,
)
from replica.engine import Engine
from replica.engine_loop import EngineLoop
from replica.link import Incarnation, LinkServer
from replica.mock_runner import MockRunner
from tests.replica.link_fakes import SECRET, RawRouter, request, until

TINY = EngineLimits(
    max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128, num_blocks=64, block_size=4, max_waiting=40, vocab_size=1000
)
STEP = StepTimeCoefficients(a=5e-4, b=0.0, c=0.0, d=0.0)


@dataclass
class View:
    """What one connection has been told."""

    live: dict[int, int] = field(default_factory=dict)  # attempt → tokens heard
    known: set[bytes] | None = None  # findable blocks
    sequence: int = 0
    snapshots_compared: int = 0
    ended: int = 0

    async def listen(self, router: RawRouter) -> None:
        while True:
            message = await router.read()
            if isinstance(message, Snapshot):
                self._compare(message)
            elif isinstance(message, Frame):
                self._follow(message)
                for delta in message.deltas:
                    self._hear(delta)
                for bounce in message.bounces:
                    del self.live[bounce.attempt]

    def _compare(self, snapshot: Snapshot) -> None:
        found = {key for key, _ in snapshot.blocks}
        if self.known is not None:
            assert snapshot.sequence == self.sequence and found == self.known
            self.snapshots_compared += 1
        self.known, self.sequence = found, snapshot.sequence

    def _follow(self, frame: Frame) -> None:
        if self.known is None:
            return
        assert frame.sequence == self.sequence + frame.batches, "events were lost"
        self.sequence = frame.sequence
        for event in frame.events:
            if isinstance(event, Stored):
                assert not self.known & set(event.keys)
                self.known |= set(event.keys)
            else:
                assert set(event.keys) <= self.known  # type: ignore[union-attr]
                self.known -= set(event.keys)  # type: ignore[union-attr]

    def _hear(self, delta: TokenDelta) -> None:
        assert delta.attempt in self.live, "told something after the end"
        self.live[delta.attempt] += len(delta.token_ids)
        if delta.finish is not None:
            del self.live[delta.attempt]
            self.ended += 1


def any_request(draw: random.Random, attempt: int) -> GenerateRequest:
    family, length = draw.randint(0, 3), draw.randint(1, 100)
    plain = request(attempt, draw.randint(0, 60), tuple((family * 31 + i * 7) % 1000 for i in range(length)))
    sampling = msgspec.structs.replace(plain.sampling, ignore_eos=True, prompt_logprobs=draw.choice((None, None, None, 2)))
    return msgspec.structs.replace(plain, sampling=sampling, deadline_s=draw.choice((None, None, 0.01, 100.0)))


async def misbehave(draw: random.Random, address: tuple[str, int], name: str, end_s: float) -> list[View]:
    """Connect again and again; each time do at random what a router may do, then vanish."""
    views: list[View] = []
    attempt = 0
    while time.monotonic() < end_s:
        router = await RawRouter.join(address, name)
        views.append(view := View())
        listening = asyncio.create_task(view.listen(router))
        leave_s = min(end_s, time.monotonic() + draw.uniform(0.2, 0.8))
        try:
            while time.monotonic() < leave_s and not listening.done():
                chance = draw.random()
                if chance < 0.5:
                    wanted = tuple(any_request(draw, attempt + i) for i in range(draw.randint(1, 4)))
                    attempt += len(wanted)
                    view.live.update({each.attempt: 0 for each in wanted})
                    router.write(Submit(wanted))
                elif chance < 0.7 and view.live:
                    router.write(Cancel((draw.choice(list(view.live)),)))
                elif chance < 0.85:
                    router.write(WantSnapshot())
                await asyncio.sleep(draw.choice((0.0, 0.002, 0.01)))
            if listening.done():
                listening.result()
        finally:
            listening.cancel()
            router.close()
    return views


async def history(seed: int, duration_s: float) -> None:
    runner = MockRunner(TINY, STEP)
    engine = Engine(runner, EngineConfig(), "m", "r", time.monotonic)
    loop = EngineLoop(engine, runner, lambda delivery: link.deliver(delivery))
    link = LinkServer(Incarnation("r1", 7, "m", "r0", "f", TINY), loop.inbox, engine.load(), SECRET)
    address = await link.start("127.0.0.1")
    loop.start()
    runs: list[asyncio.Task[list[View]]] = []
    try:
        end_s = time.monotonic() + duration_s
        runs = [asyncio.create_task(misbehave(random.Random(seed + i), address, f"router-{i}", end_s)) for i in range(3)]
        views = [view for each in await asyncio.gather(*runs) for view in each]
        await until(lambda: link.fanout.is_empty)
        assert loop.pulse().alive, loop.pulse().reason
        assert await link.drain(5.0)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        await link.stop()
        await loop.stop()
    assert sum(view.snapshots_compared for view in views) > 5 and sum(view.ended for view in views) > 5
    engine.check()
    assert engine.ledger.accepted == sum(engine.ledger.ended(reason) for reason in FinishReason)
    assert engine.roster.kv.pool.referenced == 0


async def test_any_history_leaves_nothing_behind_and_no_router_in_the_dark() -> None:
    await history(seed=5, duration_s=2.0)


async def test_an_event_that_is_not_told_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = BlockPool.publish

    def silent(self: BlockPool, *arguments: object) -> None:
        publish(self, *arguments)  # type: ignore[arg-type]
        if len(self.snapshot()) % 7 == 0:
            self.events._events.clear()

    monkeypatch.setattr(BlockPool, "publish", silent)
    with pytest.raises(AssertionError):
        await history(seed=5, duration_s=2.0)
