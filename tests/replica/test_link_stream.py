"""What passes through the link: frames, cancels, KV events, heartbeats, snapshots, the drain."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from replica import link as link_module
from replica.contract import wire
from replica.contract.messages import Bounce, BounceReason, Cancel, FinishReason, Frame, GenerateRequest, Snapshot, Submit, WantSnapshot
from replica.link import LinkLimits
from tests.replica.link_fakes import LIMITS, Output, PacedRunner, RawRouter, ScriptedEngine, replica, request, until


async def test_one_frame_per_step_with_everything_in_it() -> None:
    runner = PacedRunner(gated=True)
    async with replica(ScriptedEngine(events_each_step=True), runner) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=tuple(request(attempt, max_tokens=3) for attempt in (1, 2, 3))))
        frames = []
        for _ in range(3):
            await asyncio.to_thread(runner.entered.acquire)
            runner.gate.release()
            frames.append(await router.frame())
        assert [[delta.attempt for delta in frame.deltas] for frame in frames] == [[1, 2, 3]] * 3
        assert [delta.finish for delta in frames[2].deltas] == [FinishReason.LENGTH] * 3
        assert [frame.accepted for frame in frames] == [(1, 2, 3), (), ()]
        assert frames[0].load.running == 3  # the frame that accepts them counts them
        assert [frame.load.progress for frame in frames] == [1, 2, 3]
        assert [(frame.sequence, frame.batches, len(frame.events)) for frame in frames] == [(1, 1, 1), (2, 1, 1), (3, 1, 1)]
        assert frames[2].load.running == 0
        assert len(here.engine.threads) == 1
        assert threading.get_ident() not in here.engine.threads
        router.close()


async def test_two_routers_get_their_own_tokens_and_the_same_events() -> None:
    runner = PacedRunner(gated=True)  # a step begins when both have heard of the one before: nothing is merged
    async with replica(ScriptedEngine(events_each_step=True), runner) as here:
        busy, idle = await RawRouter.join(here.address, "busy"), await RawRouter.join(here.address, "idle")
        busy.write(Submit(requests=(request(5, max_tokens=4),)))
        mine, theirs = [], []
        for _ in range(4):
            runner.gate.release()
            mine.append(await busy.frame(lambda frame: bool(frame.events)))
            theirs.append(await idle.frame(lambda frame: bool(frame.events)))
        assert [frame.sequence for frame in mine] == [frame.sequence for frame in theirs] == [1, 2, 3, 4]
        assert [frame.events for frame in mine] == [frame.events for frame in theirs]
        assert all(frame.deltas == () for frame in theirs)
        busy.close()
        idle.close()


async def test_frames_to_a_router_without_a_stream_are_merged() -> None:
    async with replica(ScriptedEngine(events_each_step=True), PacedRunner(0.002)) as here:
        busy, idle = await RawRouter.join(here.address, "busy"), await RawRouter.join(here.address, "idle")
        busy.write(Submit(requests=(request(5, max_tokens=100),)))
        mine: list[Frame] = []
        while not (mine and mine[-1].deltas[-1].finish):
            mine.append(await busy.frame())
        theirs: list[Frame] = []
        while not (theirs and theirs[-1].sequence == 100):
            theirs.append(await idle.frame())
        assert len(mine) == 100
        assert len(theirs) < 60  # 100 steps of 2 ms or more, merged over 20 ms
        known = 0
        for frame in theirs:
            assert frame.sequence == known + frame.batches  # nothing missed
            known = frame.sequence
        assert [event for frame in theirs for event in frame.events] == [event for frame in mine for event in frame.events]
        busy.close()
        idle.close()


async def test_a_stream_ends_the_merging_without_a_gap() -> None:
    async with replica(ScriptedEngine(events_each_step=True), PacedRunner(0.002)) as here:
        busy, other = await RawRouter.join(here.address, "busy"), await RawRouter.join(here.address, "other")
        busy.write(Submit(requests=(request(5),)))
        known = 0
        for turn in range(60):
            if turn == 10:
                other.write(Submit(requests=(request(1, max_tokens=20), request(2, max_tokens=30))))
            frame = await other.frame()
            assert frame.sequence == known + frame.batches
            known = frame.sequence
        busy.close()
        other.close()


async def test_an_idle_replica_reports_by_the_clock() -> None:
    async with replica() as here:
        router = await RawRouter.join(here.address)
        began_s = asyncio.get_running_loop().time()
        frames = [await router.frame() for _ in range(3)]
        took_s = asyncio.get_running_loop().time() - began_s
        assert 1.3 < took_s < 6.0  # three half seconds, on a machine that may be slow
        assert all(frame.batches == 0 and frame.sequence == 0 and not frame.deltas for frame in frames)
        assert here.engine.threads == set()  # and the engine was left to sleep
        router.close()


async def test_load_is_zero_again_after_everything_is_aborted() -> None:
    """RTR-19: the last step's report is not the last word."""
    async with replica(runner=PacedRunner(0.002)) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=tuple(request(attempt) for attempt in range(40))))
        await router.frame(lambda frame: frame.load.running == 40)
        router.write(Cancel(attempts=tuple(range(40))))
        async with asyncio.timeout(5.0):
            frame = await router.frame(lambda frame: frame.load.running == 0)
        assert frame.load.free_blocks == LIMITS.num_blocks
        await until(lambda: here.link.fanout.is_empty)
        later = await router.frame()  # by the timer
        assert later.load.running == 0
        router.close()


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_a_cancelled_request_costs_at_most_two_more_steps(how: str) -> None:
    """KVC-10 at this level: after the cancel has reached the replica."""
    runner = PacedRunner(gated=True)
    async with replica(runner=runner) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1),)))
        for _ in range(3):
            await asyncio.to_thread(runner.entered.acquire)
            runner.gate.release()
        await asyncio.to_thread(runner.entered.acquire)  # step 4 runs
        assert here.engine.steps == 4
        if how == "cancel":
            router.write(Cancel(attempts=(1,)))
        else:
            router.close()
        await until(here.loop.inbox.has_any)
        runner.gate.release()
        await until(lambda: not here.engine.live)
        await until(lambda: here.link.fanout.is_empty)
        assert here.engine.steps == 4  # no further step was planned for it
        assert here.engine.tokens == 3  # and the one that ran was settled as cancelled: the cancel came in before
        router.close()


async def test_a_cancel_finds_a_request_that_the_engine_has_not_seen() -> None:
    """KVC-11, received but not queued: withdrawn from the inbox, never handed to the engine."""
    runner = PacedRunner(gated=True)
    async with replica(runner=runner) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1),)))
        await asyncio.to_thread(runner.entered.acquire)
        router.write(Submit(requests=(request(2),)))
        router.write(Cancel(attempts=(2, 3)))  # 3 was never submitted
        await until(lambda: here.loop.inbox._cancels == {(1, 2): None})
        runner.gate.release()
        await until(lambda: (1, 2) in here.engine.cancelled)
        assert here.engine.submitted == [1]
        assert (1, 3) not in here.engine.cancelled
        await until(lambda: here.link.fanout.attempts == 1)
        router.close()


async def test_tokens_of_a_forgotten_attempt_go_no_further() -> None:
    """KVC-11: no output for unknown ids, even if an engine produced some."""
    engine = ScriptedEngine()
    async with replica(engine) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1),)))
        await router.frame(lambda frame: bool(frame.deltas))
        (connection,) = here.link.fanout.routers.values()
        connection.attempts.clear()
        before = engine.steps
        await until(lambda: engine.steps > before + 5)
        frames = [await router.frame() for _ in range(2)]
        assert all(not frame.deltas for frame in frames[1:])
        router.close()


async def test_a_router_that_leaves_takes_only_its_own_work_along() -> None:
    async with replica() as here:
        leaving, staying = await RawRouter.join(here.address, "leaving"), await RawRouter.join(here.address, "staying")
        for router in (leaving, staying):
            router.write(Submit(requests=(request(1), request(2))))
            await router.frame(lambda frame: len(frame.deltas) == 2)
        leaving.close()
        await until(lambda: len(here.engine.live) == 2)
        assert len({owner for owner, _ in here.engine.live}) == 1
        await staying.frame(lambda frame: len(frame.deltas) == 2 and frame.load.running == 2)
        staying.close()
        await until(lambda: not here.engine.live)


async def test_bounces_come_back_and_hold_nothing() -> None:
    engine = ScriptedEngine(
        on_submit=lambda request: Bounce(request.attempt, BounceReason.NEVER_FITS, "too long") if request.attempt == 2 else None
    )
    async with replica(engine) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1, max_tokens=2), request(2))))
        frame = await router.frame()
        assert frame.bounces == (Bounce(2, BounceReason.NEVER_FITS, "too long"),)
        assert frame.accepted == (1,)
        await until(lambda: here.link.fanout.is_empty)
        router.close()


async def test_an_attempt_that_is_live_is_not_started_again() -> None:
    async with replica() as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1), request(1))))
        frame = await router.frame(lambda frame: bool(frame.bounces))
        assert frame.bounces[0].reason == BounceReason.BAD_REQUEST
        await until(lambda: here.engine.submitted == [1])
        router.close()


async def test_a_full_inbox_and_a_greedy_router_are_bounced() -> None:
    runner = PacedRunner(gated=True)
    async with replica(runner=runner, limits=LinkLimits(attempts_max=70)) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(0),)))
        await asyncio.to_thread(runner.entered.acquire)  # the engine is busy: what comes now stays in the inbox
        router.write(Submit(requests=tuple(request(attempt) for attempt in range(1, 101))))
        frame = await router.frame(lambda frame: bool(frame.bounces))
        assert [bounce.attempt for bounce in frame.bounces] == list(range(65, 101))  # the inbox holds max_waiting = 64
        assert {bounce.reason for bounce in frame.bounces} == {BounceReason.QUEUE_FULL}
        router.close()


async def test_a_request_the_engine_chokes_on_ends_alone() -> None:
    def choke(request: GenerateRequest) -> Bounce | None:
        if request.attempt == 2:
            raise KeyError("boom")
        return None

    async with replica(ScriptedEngine(on_submit=choke)) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1), request(2))))
        frame = await router.frame(lambda frame: bool(frame.bounces))
        assert frame.bounces[0].attempt == 2
        await router.frame(lambda frame: bool(frame.deltas))
        assert here.loop.pulse().alive
        router.close()


async def test_a_failed_step_fails_its_requests_only() -> None:
    async with replica() as here:
        router = await RawRouter.join(here.address)
        here.runner.error = ValueError("bad step")
        router.write(Submit(requests=(request(1),)))
        frame = await router.frame(lambda frame: bool(frame.deltas))
        assert frame.deltas[0].finish == FinishReason.ERROR
        here.runner.error = None
        router.write(Submit(requests=(request(2, max_tokens=1),)))
        frame = await router.frame(lambda frame: bool(frame.deltas))
        assert frame.deltas[0].finish == FinishReason.LENGTH
        router.close()


async def test_a_snapshot_answers_a_gap_in_order() -> None:
    async with replica(ScriptedEngine(events_each_step=True), PacedRunner(0.002)) as here:
        busy = await RawRouter.join(here.address, "busy")
        busy.write(Submit(requests=(request(5),)))
        await busy.frame(lambda frame: frame.sequence > 10)
        late = await RawRouter.join(here.address, "late")  # knows nothing of the first blocks
        late.write(WantSnapshot())
        snapshot = None
        while not isinstance(snapshot, Snapshot):
            snapshot = await late.read()
        assert snapshot.epoch == 77
        assert len(snapshot.blocks) == snapshot.sequence  # one block a step: the state after exactly these events
        view = dict(snapshot.blocks)
        known = snapshot.sequence
        for _ in range(20):
            frame = await late.frame(lambda frame: bool(frame.events))
            assert frame.sequence == known + frame.batches
            known = frame.sequence
            view |= {key: event.parent for event in frame.events for key in event.keys}  # type: ignore[union-attr]
        busy.close()
        await until(lambda: not here.engine.live)
        assert view.items() <= dict(here.engine.blocks).items()
        assert len(view) == known
        late.close()


async def test_a_router_that_does_not_read_is_cut() -> None:
    async with replica(ScriptedEngine(tokens_each=500), PacedRunner(0.001), limits=LinkLimits(unsent_bytes_max=64 * 1024)) as here:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, here.address)
        slow = RawRouter(*await asyncio.open_connection(sock=sock, limit=4096))
        good = await RawRouter.join(here.address, "good")
        challenge = await slow.read()
        mac = wire.handshake_mac(b"a secret of the cluster", challenge.nonce, "slow")  # type: ignore[union-attr]
        slow.write(link_module.Hello(1, "slow", mac))
        slow.write(Submit(requests=tuple(request(attempt) for attempt in range(30))))
        good.write(Submit(requests=(request(1),)))
        await until(lambda: len(here.engine.live) == 31)
        await until(lambda: len(here.engine.live) == 1, 30.0)  # its attempts are cancelled, without it reading a byte
        await good.frame(lambda frame: frame.load.running == 1)
        good.close()
        slow.close()


async def test_a_frame_that_is_too_large_costs_its_own_router_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replica(ScriptedEngine(tokens_each=500)) as here:
        big, good = await RawRouter.join(here.address, "big"), await RawRouter.join(here.address, "good")
        good.write(Submit(requests=(request(1),)))
        first = await good.frame(lambda frame: bool(frame.deltas))
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 8192)
        big.write(Submit(requests=tuple(request(attempt) for attempt in range(30))))
        assert await big.is_closed()
        await until(lambda: len(here.engine.live) == 1)
        step = first.deltas[0].token_ids[0]
        for _ in range(20):
            frame = await good.frame(lambda frame: bool(frame.deltas))
            step += 1
            assert frame.deltas[0].token_ids[0] == step, "a token is lost"
        big.close()
        good.close()


async def test_draining_bounces_new_work_and_waits_for_the_old() -> None:
    runner = PacedRunner(0.005)
    async with replica(runner=runner) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1, max_tokens=60),)))
        await router.frame(lambda frame: bool(frame.deltas))
        drain = asyncio.ensure_future(here.link.drain(20.0))
        assert (await router.frame(lambda frame: frame.load.draining)).load.draining
        router.write(Submit(requests=(request(2),)))
        frame = await router.frame(lambda frame: bool(frame.bounces))
        assert frame.bounces[0].reason == BounceReason.DRAINING
        assert not drain.done()
        await router.frame(lambda frame: any(delta.finish for delta in frame.deltas))
        assert await drain
        assert here.engine.submitted == [1]
        router.close()


async def test_a_drain_has_an_end() -> None:
    async with replica() as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1),)))
        await router.frame(lambda frame: bool(frame.deltas))
        assert not await here.link.drain(0.05)
        router.close()  # moved elsewhere
        assert await here.link.drain(10.0)


async def test_an_engine_that_dies_is_seen_by_routers_and_by_health() -> None:
    engine = ScriptedEngine()
    async with replica(engine) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1),)))
        await router.frame(lambda frame: bool(frame.deltas))

        def broken() -> None:
            raise RuntimeError("a bug")

        engine.plan = broken  # type: ignore[method-assign]
        assert await router.is_closed()
        await until(lambda: not here.loop.pulse().alive)
        assert here.loop.pulse().reason == "RuntimeError: a bug"
        again = await RawRouter.connect(here.address)
        assert "a bug" in (await again.read()).reason  # type: ignore[union-attr]
        again.close()


async def test_a_stuck_engine_shows_pending_work_without_progress_and_without_spinning() -> None:
    engine = ScriptedEngine(stuck=True)
    async with replica(engine) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1),)))
        await until(lambda: here.loop.pulse().waiting_s > 0.3)
        pulse = here.loop.pulse()
        assert pulse.alive
        assert pulse.pending_work
        assert pulse.progress == 0
        router.write(Submit(requests=(request(2),)))  # asking is no progress
        await until(lambda: engine.submitted == [1, 2])
        assert here.loop.pulse().waiting_s > 0.3
        engine.stuck = False
        await until(lambda: here.loop.pulse().progress > 2)
        assert here.loop.pulse().waiting_s < 0.3
        router.close()


async def test_output_without_a_step_is_told() -> None:
    engine = ScriptedEngine(stuck=True)
    async with replica(engine) as here:
        router = await RawRouter.join(here.address)
        router.write(Submit(requests=(request(1),)))
        await until(lambda: bool(engine.live))
        ((owner, _),) = engine.live
        engine.flushes.append(Output(((owner, wire_timeout()),)))
        engine.live.clear()
        frame = await router.frame(lambda frame: bool(frame.deltas))
        assert frame.deltas[0].finish == FinishReason.TIMEOUT
        await until(lambda: here.link.fanout.is_empty)
        router.close()


def wire_timeout() -> object:
    from replica.contract.messages import TokenDelta

    return TokenDelta(attempt=1, finish=FinishReason.TIMEOUT)
