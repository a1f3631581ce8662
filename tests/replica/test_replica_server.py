"""A whole replica: the real engine on its thread, mock tokens, real connections, the router's real client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from replica.config import EngineConfig
from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import (
    FinishReason,
    Frame,
    GenerateRequest,
    SamplingParams,
    Snapshot,
    StepTimeCoefficients,
    Stored,
    TokenDelta,
    Welcome,
)
from replica.mock_runner import MockRunner, mock_limits, mock_token
from replica.server import ReplicaServer, Unhealthy
from replica.step import Step, StepResult
from router.link import LinkClient, Member

SECRET = b"server test"


class Ear:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.welcome: Welcome | None = None
        self.frames: list[Frame] = []
        self.snapshots: list[Snapshot] = []
        self.reasons: list[str] = []
        self.changed = asyncio.Event()

    def connected(self, replica_id: str, welcome: Welcome) -> None:
        self.welcome = welcome
        self.changed.set()

    def frame(self, replica_id: str, frame: Frame) -> None:
        self.frames.append(frame)
        self.changed.set()

    def snapshot(self, replica_id: str, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self.changed.set()

    def lost(self, replica_id: str, reason: str) -> None:
        self.reasons.append(reason)
        self.changed.set()

    def deltas(self, attempt: int) -> list[TokenDelta]:
        return [delta for frame in self.frames for delta in frame.deltas if delta.attempt == attempt]

    def tokens(self, attempt: int) -> list[int]:
        return [token for delta in self.deltas(attempt) for token in delta.token_ids]

    def finish(self, attempt: int) -> FinishReason | None:
        deltas = self.deltas(attempt)
        return deltas[-1].finish if deltas else None


def config(**changes: object) -> EngineConfig:
    return EngineConfig.model_validate({"runner": "mock", "mock_step_ms": 1.0, "num_gpu_blocks_override": 200, **changes})


def make_request(attempt: int, *, length: int = 40, max_tokens: int = 20, seed: int = 0) -> GenerateRequest:
    prompt = tuple((seed * 1000 + index) % 40_000 + 10 for index in range(length))
    keys = block_keys(root_key(model="smollm2", revision=""), prompt, 16)
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(attempt=attempt, request_id=f"r{attempt}", choice=0, prompt_ids=prompt, block_keys=keys, sampling=sampling)


@asynccontextmanager
async def serving(server: ReplicaServer) -> AsyncIterator[tuple[ReplicaServer, LinkClient, Ear]]:
    await server.start()
    ear = Ear()
    client = LinkClient(Member("replica-1", *server.address), router_id="router", secret=SECRET, listener=ear)
    try:
        client.start()
        await until(lambda: client.connected)
        yield server, client, ear
    finally:
        await client.close()
        await server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine" and thread.is_alive()]


def server(**changes: object) -> ReplicaServer:
    return ReplicaServer(config(**changes), replica_id="replica-1", secret=SECRET)


async def until(condition, timeout_s: float = 15.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of other threads' objects have no event
            await asyncio.sleep(0.003)


async def test_streams_end_to_end() -> None:
    async with serving(server()) as (replica, client, ear):
        assert client.submit([make_request(attempt, seed=attempt, max_tokens=20 + attempt) for attempt in range(1, 9)])
        await until(lambda: all(ear.finish(attempt) for attempt in range(1, 9)))
        for attempt in range(1, 9):
            want = [mock_token(attempt, 0, 40 + index, replica.limits.vocab_size) for index in range(20 + attempt)]
            assert ear.tokens(attempt) == want
            assert ear.finish(attempt) == FinishReason.LENGTH
            assert [bool(delta.finish) for delta in ear.deltas(attempt)].count(True) == 1
            first = ear.deltas(attempt)[0]
            assert (first.cached_tokens, first.waited_s is not None) == (0, True)
        assert [attempt for frame in ear.frames for attempt in frame.accepted] == list(range(1, 9))
        progress = [frame.load.progress for frame in ear.frames if frame.deltas]
        assert len(progress) == len(set(progress))  # one frame per step
        stats = replica.stats()
        assert stats["running"] == stats["waiting"] == stats["attempts"] == 0
        assert stats["free_blocks"] + stats["evictable_blocks"] == stats["num_blocks"] == 200
        assert stats["kv_usage"] == 0


async def test_kv_events_agree_with_the_snapshot() -> None:
    async with serving(server()) as (replica, client, ear):
        client.submit([make_request(attempt, seed=attempt) for attempt in range(1, 6)])
        await until(lambda: all(ear.finish(attempt) for attempt in range(1, 6)))
        view: dict[bytes, bytes] = {}
        known = 0
        for frame in ear.frames:
            assert frame.sequence == known + frame.batches
            known = frame.sequence
            for event in frame.events:
                assert isinstance(event, Stored)
                view |= dict(zip(event.keys, (event.parent, *event.keys), strict=False))
        client.want_snapshot()
        await until(lambda: bool(ear.snapshots))
        assert ear.snapshots[0].sequence == known
        assert ear.snapshots[0].epoch == replica.epoch
        assert dict(ear.snapshots[0].blocks) == view
        assert view[make_request(1, seed=1).block_keys[0]] == root_key(model="smollm2", revision="")
        client.submit([make_request(9, seed=1)])
        await until(lambda: ear.finish(9) is not None)
        assert ear.deltas(9)[0].cached_tokens == 32


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_leaving_mid_stream_frees_everything(how: str) -> None:
    """KVC-10: within a second and two steps after the cancel has arrived."""
    async with serving(server(mock_step_ms=5.0, num_gpu_blocks_override=2000)) as (replica, client, ear):
        client.submit([make_request(attempt, seed=attempt, max_tokens=2000, length=100) for attempt in range(1, 9)])
        await until(lambda: all(len(ear.tokens(attempt)) > 3 for attempt in range(1, 9)))
        assert replica.stats()["kv_usage"] > 0
        if how == "cancel":
            client.cancel(range(1, 9))
        else:
            await client.close()
            assert ear.reasons == ["closed"]
        await until(lambda: replica.stats()["running"] == 0 and replica.stats()["attempts"] == 0)
        await until(lambda: replica.stats()["kv_usage"] == 0 and not replica.pulse().pending_work)
        steps = replica.pulse().progress
        await asyncio.sleep(0.05)
        assert replica.pulse().progress == steps
        replica._parts.engine.check()  # type: ignore[union-attr] - idle: every block accounted for
        if how == "cancel":
            await until(lambda: ear.frames[-1].load.running == 0)


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_a_cancel_costs_no_step_but_the_one_that_runs(how: str) -> None:
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def wait_at_the_gate(_: float) -> None:
        entered.release()
        gate.acquire(timeout=20.0)

    runner = MockRunner(mock_limits(config()), StepTimeCoefficients(a=1.0, b=0.0, c=0.0, d=0.0), sleep=wait_at_the_gate)
    async with serving(ReplicaServer(config(), replica_id="replica-1", secret=SECRET, runner=runner)) as (replica, client, _):
        client.submit([make_request(1, max_tokens=2000)])
        for _ in range(3):
            await asyncio.to_thread(entered.acquire)
            gate.release()
        await asyncio.to_thread(entered.acquire)
        if how == "cancel":
            client.cancel([1])
        else:
            await client.close()
        parts = replica._parts
        assert parts is not None
        await until(parts.loop.inbox.has_any)
        assert replica.stats()["kv_usage"] > 0  # blocks stay until the step that uses them has ended
        gate.release()
        await until(lambda: parts.link.fanout.is_empty and not replica.pulse().pending_work)
        assert runner.steps == 4
        assert replica.stats()["kv_usage"] == 0
        parts.engine.check()


async def test_what_cannot_fit_is_bounced_and_the_rest_served() -> None:
    async with serving(server(num_gpu_blocks_override=10)) as (_, client, ear):
        client.submit([make_request(1, length=1000), make_request(2, length=20, max_tokens=5)])
        await until(lambda: ear.finish(2) is not None)
        bounces = [bounce for frame in ear.frames for bounce in frame.bounces]
        assert [bounce.attempt for bounce in bounces] == [1]
        assert "1001" in bounces[0].message
        assert "160" in bounces[0].message


async def test_a_context_the_pool_cannot_hold_is_refused_at_start() -> None:
    for runner in (None, MockRunner(mock_limits(config(num_gpu_blocks_override=10)))):
        replica = ReplicaServer(
            config(max_model_len=2048, num_gpu_blocks_override=10), replica_id="replica-1", secret=SECRET, runner=runner
        )
        with pytest.raises(ValueError, match=r"2048.*160"):
            await replica.start()
        with pytest.raises(Unhealthy, match="not running"):
            replica.check_health()
        await replica.stop()


async def test_ranks_that_are_not_there_are_refused_at_start() -> None:
    replica = ReplicaServer(EngineConfig(tensor_parallel_size=3), replica_id="replica-1", secret=SECRET)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 3, and the replica has 1"):
        await replica.start()


async def test_one_not_given_is_lowered_to_what_fits() -> None:
    async with serving(server(num_gpu_blocks_override=10)) as (replica, _, ear):
        assert replica.limits.max_model_len == 160
        assert ear.welcome is not None
        assert ear.welcome.limits == replica.limits
        assert ear.welcome.model == "smollm2"


async def test_draining_waits_and_bounces() -> None:
    async with serving(server(mock_step_ms=3.0)) as (replica, client, ear):
        client.submit([make_request(1, max_tokens=60)])
        await until(lambda: bool(ear.tokens(1)))
        drain = asyncio.ensure_future(replica.drain(20.0))
        await until(lambda: ear.frames[-1].load.draining)
        client.submit([make_request(2)])
        await until(lambda: any(frame.bounces for frame in ear.frames))
        assert not drain.done()
        assert await drain
        assert len(ear.tokens(1)) == 60
        replica.check_health()


async def test_epochs_differ() -> None:
    first, second = server(), server()
    assert first.epoch < second.epoch


class Hanging(MockRunner):
    def __init__(self) -> None:
        super().__init__(mock_limits(config()))
        self.hang = threading.Event()

    def execute(self, step: Step) -> StepResult:
        if step.step_id > 3:
            self.hang.wait(30.0)
        return super().execute(step)


async def test_a_stall_is_seen_and_idling_is_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.server.STALL_MIN_S", 0.2)
    runner = Hanging()
    async with serving(ReplicaServer(config(), replica_id="replica-1", secret=SECRET, runner=runner)) as (replica, client, ear):
        await asyncio.sleep(0.4)
        replica.check_health()  # nothing to do for longer than the limit: healthy
        client.submit([make_request(1, max_tokens=30)])
        await until(lambda: bool(ear.tokens(1)))
        await asyncio.sleep(0.5)
        with pytest.raises(Unhealthy, match="no progress for"):
            replica.check_health()
        heard = len(ear.frames)
        await until(lambda: len(ear.frames) > heard)  # reports go on, and show the same progress: routers see the stall too
        assert ear.frames[-1].load.progress == ear.frames[heard - 1].load.progress
        assert ear.frames[-1].load.running == 1
        runner.hang.set()
        await until(lambda: ear.finish(1) is not None)
        replica.check_health()


async def test_a_dead_engine_is_unhealthy_and_its_routers_hear_of_it() -> None:
    async with serving(server()) as (replica, client, ear):
        client.submit([make_request(1, max_tokens=4000)])
        await until(lambda: bool(ear.tokens(1)))

        def broken() -> None:
            raise RuntimeError("a bug")

        replica._parts.engine.plan = broken  # type: ignore[union-attr, method-assign, assignment]
        await until(lambda: bool(ear.reasons))
        assert not client.connected
        with pytest.raises(Unhealthy, match="the engine is dead: RuntimeError: a bug"):
            replica.check_health()
        assert not client.submit([make_request(2)])
