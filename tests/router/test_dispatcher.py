"""The shell on a real event loop, with fake links."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from replica.contract.messages import Bounce, BounceReason, FinishReason, Frame, TokenDelta
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.link import LinkListener, Member
from router.link_fake import FakeLink
from router.ports import Batch, Delta, Rejected
from router.session import DELTAS_MAX, BatchSession
from tests.router.modelled_replica import ModelledReplica
from tests.router.virtual_world import prompt_of, request


class Bench:
    """A dispatcher, and the other ends of its links."""

    def __init__(self, config: RouterConfig) -> None:
        self.links: list[FakeLink] = []
        self.dispatcher = Dispatcher(config, connect=self._connect, model="m", revision="r", seed=1)

    def _connect(self, member: Member, listener: LinkListener) -> FakeLink:
        self.links.append(FakeLink(member.replica_id, listener))
        return self.links[-1]

    def join(self, *names: str) -> None:
        before = len(self.links)
        self.dispatcher.update_replicas([Member(name, "127.0.0.1", 1) for name in names])
        for link in self.links[before:]:
            link.welcome(ModelledReplica(link.replica_id).welcome())

    def frame(self, link: FakeLink, *deltas: TokenDelta, accepted: tuple[int, ...] = (), bounces: tuple[Bounce, ...] = ()) -> None:
        load = ModelledReplica(link.replica_id).load()
        link.frame(Frame(epoch=1, sequence=0, load=load, deltas=deltas, accepted=accepted, bounces=bounces))

    async def open(self, choices: int = 1) -> "asyncio.Task[BatchSession]":
        now = asyncio.get_running_loop().time()
        batch = Batch("q", tuple(request("q", prompt_of(1, 40), choice=i, max_tokens=5) for i in range(choices)), now)
        task = asyncio.create_task(self.dispatcher.open(batch))
        await asyncio.sleep(0)
        return task


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    one = Bench(RouterConfig())
    yield one
    await one.dispatcher.stop(0.0)


async def test_from_open_to_the_end(bench: Bench) -> None:
    assert not bench.dispatcher.status().ready
    bench.join("r0")
    assert bench.dispatcher.status().ready
    await asyncio.sleep(0)
    (link,) = bench.links
    assert link.snapshots_wanted == 1
    task = await bench.open()
    (sent,) = link.submitted
    bench.frame(link)
    assert not task.done(), "not accepted yet"
    bench.frame(link, accepted=(sent.attempt,))
    session = await task
    bench.frame(link, TokenDelta(sent.attempt, (1, 2), cached_tokens=0, waited_s=0.0))
    bench.frame(link, TokenDelta(sent.attempt, (3,), finish=FinishReason.STOP))
    assert [delta.token_ids async for deltas in session for delta in deltas] == [(1, 2), (3,)]
    session.close()
    assert link.cancelled == []


async def test_a_disconnect_cancels_at_the_replica_at_once(bench: Bench) -> None:
    bench.join("r0")
    (link,) = bench.links
    task = await bench.open()
    (sent,) = link.submitted
    bench.frame(link, accepted=(sent.attempt,))
    session = await task
    session.close()
    session.close()
    assert link.cancelled == [sent.attempt]
    with pytest.raises(StopAsyncIteration):
        await anext(session)


async def test_a_caller_that_gives_up_waiting_to_be_admitted_cancels_too(bench: Bench) -> None:
    bench.join("r0")
    (link,) = bench.links
    task = await bench.open()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert link.cancelled == [link.submitted[0].attempt]
    assert bench.dispatcher.board.traffic.dispatches == {}


async def test_a_choice_that_is_stopped_is_heard_no_more(bench: Bench) -> None:
    bench.join("r0")
    (link,) = bench.links
    task = await bench.open(2)
    first, second = link.submitted
    bench.frame(link, accepted=(first.attempt, second.attempt))
    session = await task
    bench.frame(link, TokenDelta(first.attempt, (1,)), TokenDelta(second.attempt, (2,)))
    session.stop(0)
    bench.frame(link, TokenDelta(first.attempt, (1,)), TokenDelta(second.attempt, (), finish=FinishReason.LENGTH))
    assert [delta.index async for deltas in session for delta in deltas] == [1, 1]
    assert link.cancelled == [first.attempt]


async def test_a_lost_link_moves_the_stream_and_is_tried_again(bench: Bench) -> None:
    bench.join("r0", "r1")
    task = await bench.open()
    old = next(link for link in bench.links if link.submitted)
    other = next(link for link in bench.links if not link.submitted)
    (sent,) = old.submitted
    bench.frame(old, TokenDelta(sent.attempt, (7,), cached_tokens=0, waited_s=0.0))
    session = await task
    old.lose("reset")
    (again,) = other.submitted
    assert again.emitted_ids == (7,)
    bench.frame(other, TokenDelta(again.attempt, (8,), finish=FinishReason.LENGTH))
    assert [delta.token_ids async for deltas in session for delta in deltas] == [(7,), (8,)]
    async with asyncio.timeout(5):
        while len(bench.links) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert bench.links[2].replica_id == old.replica_id


async def test_the_only_replica_dies_before_the_first_token(bench: Bench) -> None:
    bench.join("r0")
    (link,) = bench.links
    task = await bench.open()
    bench.frame(link, accepted=(link.submitted[0].attempt,))
    session = await task
    link.lose("killed")
    bench.dispatcher.update_replicas([])
    with pytest.raises(Rejected) as refusal:
        async with asyncio.timeout(10):
            await anext(session)
    assert refusal.value.status == 503
    assert refusal.value.retry_after_s


async def test_a_bounce_that_says_never_is_400_and_no_fault(bench: Bench) -> None:
    bench.join("r0")
    (link,) = bench.links
    task = await bench.open()
    bench.frame(link, bounces=(Bounce(link.submitted[0].attempt, BounceReason.NEVER_FITS, "41 > 40"),))
    with pytest.raises(Rejected, match="41 > 40") as refusal:
        await task
    assert refusal.value.status == 400
    assert bench.dispatcher.status().ready


async def test_what_a_link_cannot_take_goes_elsewhere(bench: Bench) -> None:
    bench.join("r0", "r1")
    bench.links[0].accepting = False
    for _ in range(4):
        task = await bench.open()
        task.cancel()
    assert len(bench.links[1].submitted) == 4
    assert bench.links[0].submitted == []


async def test_late_calls_of_an_old_link_are_not_heard(bench: Bench) -> None:
    bench.join("r0")
    (old,) = bench.links
    listener = old._listener
    old.lose("reset")
    async with asyncio.timeout(5):
        while len(bench.links) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    bench.links[1].welcome(ModelledReplica("r0").welcome())
    task = await bench.open()
    (sent,) = bench.links[1].submitted
    listener.frame("r0", Frame(1, 0, ModelledReplica("r0").load(), (TokenDelta(sent.attempt, (9,)),)))
    listener.lost("r0", "again")
    assert bench.dispatcher.status().ready
    assert not task.done()
    task.cancel()


async def test_membership_lets_go_and_takes_back(bench: Bench) -> None:
    bench.join("r0", "r1")
    bench.join("r1")
    assert bench.dispatcher.status().replicas == 2
    assert len(bench.dispatcher.board.fleet.routable()) == 1
    bench.join("r0", "r1")
    assert len(bench.dispatcher.board.fleet.routable()) == 2
    bench.join("r1")
    bench.links[0].lose("the replica stops")
    await asyncio.sleep(0.2)
    assert len(bench.links) == 2, "who has left is not tried again"


async def test_another_pools_replica_is_shut_out(bench: Bench) -> None:
    bench.join("r0")
    bench.dispatcher.update_replicas([Member("r0", "127.0.0.1", 1), Member("s", "127.0.0.1", 2)])
    stranger = bench.links[1]
    stranger.welcome(ModelledReplica("s", fingerprint="other").welcome())
    await asyncio.sleep(0.01)
    assert not stranger.connected
    assert bench.dispatcher.status().replicas == 1
    assert list(bench.dispatcher._links._refused) == ["s"]
    bench.dispatcher.update_replicas([Member("r0", "127.0.0.1", 1)])
    assert not bench.dispatcher._links._refused, "nothing is remembered of who has left"


async def test_a_fault_while_it_is_sent_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.join("r0")
    (link,) = bench.links

    def fail(requests: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(link, "submit", fail)
    with pytest.raises(RuntimeError):
        await (await bench.open())
    board = bench.dispatcher.board
    assert not bench.dispatcher._sessions and not board.traffic.dispatches and not board.traffic.attempts


async def test_a_client_that_leaves_as_a_replica_joins_leaves_nothing_there(bench: Bench) -> None:
    """The stream moves to the replica that has just said Welcome: its cancel must not overtake its submission."""
    bench.join("r0")
    task = await bench.open()
    (old,) = bench.links
    (sent,) = old.submitted
    bench.frame(old, TokenDelta(sent.attempt, (7,), cached_tokens=0, waited_s=0.0))
    session = await task
    old.lose("reset")
    bench.dispatcher.update_replicas([Member("r1", "127.0.0.1", 1)])
    new = bench.links[-1]
    new.welcome(ModelledReplica("r1").welcome())
    session.close()
    assert len(new.submitted) == 1 and new.cancelled == [new.submitted[0].attempt]


async def test_a_stop_whose_time_is_up_says_so(bench: Bench) -> None:
    bench.join("r0")
    (link,) = bench.links
    waiting, running = await bench.open(), await bench.open()
    bench.frame(link, TokenDelta(link.submitted[1].attempt, (7,), cached_tokens=0, waited_s=0.0))
    session = await running
    assert [delta.token_ids for delta in await anext(session)] == [(7,)]
    await bench.dispatcher.stop(0.0)
    with pytest.raises(Rejected) as first:
        await waiting
    with pytest.raises(Rejected) as second:
        await anext(session)
    assert {(one.value.status, one.value.reason) for one in (first, second)} == {(503, "stopping")}
    assert link.cancelled == [one.attempt for one in link.submitted]


async def test_stop_lets_streams_finish_and_takes_no_new_ones() -> None:
    bench = Bench(RouterConfig())
    bench.join("r0")
    (link,) = bench.links
    task = await bench.open()
    (sent,) = link.submitted
    bench.frame(link, accepted=(sent.attempt,))
    session = await task
    stopping = asyncio.create_task(bench.dispatcher.stop(10.0))
    await asyncio.sleep(0.01)
    assert not bench.dispatcher.status().ready
    with pytest.raises(Rejected) as refusal:
        await (await bench.open())
    assert refusal.value.status == 503
    bench.frame(link, TokenDelta(sent.attempt, (1,), finish=FinishReason.STOP))
    async with asyncio.timeout(5):
        await stopping
    assert [delta.finish async for deltas in session for delta in deltas] == [FinishReason.STOP]
    assert not link.connected


async def test_the_queue_of_a_caller_that_reads_nothing_is_bounded() -> None:
    closed: list[bool] = []
    session = BatchSession(stop=lambda index: None, close=lambda: closed.append(True))
    for _ in range(DELTAS_MAX):
        assert session.put(Delta(0, (1,)))
    assert not session.put(Delta(0, (1,)))


async def test_who_listens_is_told_once_a_turn(bench: Bench) -> None:
    bench.join("r0")
    (link,) = bench.links
    task = await bench.open()
    (sent,) = link.submitted
    bench.frame(link, TokenDelta(sent.attempt, (1,), cached_tokens=0, waited_s=0.0))
    session = await task
    heard: list[list[tuple[int, ...]]] = []
    session.listen(lambda: heard.append([delta.token_ids for delta in session.take()]))
    await asyncio.sleep(0)
    assert heard == [[(1,)]], "what had come before"
    bench.frame(link, TokenDelta(sent.attempt, (2,)))
    bench.frame(link, TokenDelta(sent.attempt, (3,)))
    assert len(heard) == 1, "not within the frame: others may be in it"
    await asyncio.sleep(0)
    assert heard[1:] == [[(2,), (3,)]]
    session.close()
    assert link.cancelled == [sent.attempt]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda session: session.reject(Rejected(503, "stopping", "this router is stopping")), Rejected),
        (lambda session: session.ended(), StopAsyncIteration),
        (lambda session: session.close(), StopAsyncIteration),  # the dispatcher's, of one that reads nothing
    ],
    ids=["rejected", "ended", "closed"],
)
@pytest.mark.parametrize("before", [True, False])
async def test_who_listens_hears_of_the_end(end: Callable[[BatchSession], None], error: type[Exception], before: bool) -> None:
    session = BatchSession(stop=lambda index: None, close=lambda: None)
    raised: list[type[BaseException]] = []

    def take() -> None:
        try:
            session.take()
        except Exception as why:
            raised.append(type(why))

    if before:
        end(session)
    session.listen(take)
    if not before:
        end(session)
    await asyncio.sleep(0)
    assert raised == [error]
