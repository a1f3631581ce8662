"""Whatever befalls the replicas, every choice has exactly one outcome and its tokens are those of the undisturbed run."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.messages import FinishReason, Frame, TokenDelta
from router.config import RouterConfig
from router.dispatch import Bounds, Dispatch
from tests.router.modelled_replica import ModelledReplica, limits
from tests.router.virtual_world import Outcome, World, prompt_of, request

CONFIG = RouterConfig(queue_time_slo_s=30.0, drain_timeout_s=1.0)


def check(outcome: Outcome, closed: set[int], stopped: set[tuple[int, int]]) -> None:
    """One outcome per choice; tokens are a prefix of the truth, all of it when the choice says it is complete."""
    batch_id = outcome.batch_id
    assert outcome.ended
    if outcome.rejected is not None:
        assert not outcome.deltas
        return
    for index in range(len(outcome.batch.requests)):
        tokens, finishes, truth = outcome.tokens(index), outcome.finishes(index), outcome.expected(index)
        assert tokens == truth[: len(tokens)], "a token was lost or doubled"
        if batch_id in closed or (batch_id, index) in stopped:
            assert len(finishes) <= 1
            continue
        assert len(finishes) == 1
        if finishes == [FinishReason.LENGTH]:
            assert tokens == truth
        else:
            assert finishes == [FinishReason.ERROR]
        facts = [delta for delta in outcome.deltas if delta.index == index and delta.cached_tokens is not None]
        assert len(facts) <= 1


def chaos(seed: int, world_seed: int = 1) -> tuple[World, set[int], set[tuple[int, int]]]:
    """Ten virtual seconds of arrivals, deaths, restarts, freezes, drains, cancels, late and doubled frames."""
    random = Random(seed)
    small = limits(max_waiting=6, max_num_seqs=8)
    world = World(CONFIG, [ModelledReplica(f"r{i}", limits=small) for i in range(3)], seed=world_seed)
    closed: set[int] = set()
    stopped: set[tuple[int, int]] = set()
    late: list[tuple[str, Frame]] = []

    def arrive() -> None:
        prompt = prompt_of(random.randrange(6), random.randrange(1, 300))
        most = random.randrange(1, 400)
        world.arrive(*(request(f"q{world.now}", prompt, choice=i, max_tokens=most, seed=3) for i in range(random.choice((1, 1, 1, 3)))))

    def kill() -> None:
        if world.replicas:
            name = random.choice(sorted(world.replicas))
            dead = world.replicas[name]
            late.append((name, dead.end(world.now) if dead.step else dead.frame()))
            world.kill(name)
            reborn = ModelledReplica(name, limits=small, epoch=dead.epoch + 1)
            world.at(world.now + random.random(), lambda: world.connect(reborn))

    def freeze() -> None:
        if world.replicas:
            name = random.choice(sorted(world.replicas))
            frozen = world.replicas[name]
            frozen.frozen = True
            world.at(world.now + random.random() * 6, lambda: world.thaw(frozen))

    def drain() -> None:
        if world.replicas:
            world.replicas[random.choice(sorted(world.replicas))].draining = True

    def cancel() -> None:
        if world.board.traffic.dispatches:
            batch_id = random.choice(sorted(world.board.traffic.dispatches))
            closed.add(batch_id)
            world.carry_out(world.board.close(batch_id, world.now))

    def stop() -> None:
        if world.board.traffic.dispatches:
            batch_id = random.choice(sorted(world.board.traffic.dispatches))
            stopped.add((batch_id, 0))
            world.carry_out(world.board.stop(batch_id, 0, world.now))

    def rumour() -> None:
        """A frame of a dead incarnation, and one that names attempts of others."""
        for name, frame in late:
            if name in world.incarnations:
                world.carry_out(world.board.frame(world.incarnations[name], frame, world.now))
        for name in sorted(world.replicas):
            strangers = tuple(TokenDelta(attempt, (99_999,)) for attempt in range(1, 60) if attempt not in _present(world, name))
            frame = Frame(world.replicas[name].epoch, world.replicas[name].sequence, world.replicas[name].load(), strangers)
            world.carry_out(world.board.frame(world.incarnations[name], frame, world.now))

    for _ in range(40):
        world.at(random.random() * 10, arrive)
    for what, times in ((kill, 3), (freeze, 2), (drain, 1), (cancel, 3), (stop, 3), (rumour, 3)):
        for _ in range(random.randrange(times + 1)):
            world.at(random.random() * 10, what)
    world.run(60.0)
    return world, closed, stopped


def _present(world: World, name: str) -> set[int]:
    return {attempt for attempt, (_, stream) in world.board.traffic.attempts.items() if stream.incarnation == world.incarnations[name]}


def check_whole(world: World, closed: set[int], stopped: set[tuple[int, int]]) -> None:
    for outcome in world.outcomes.values():
        check(outcome, closed, stopped)
    assert not world.board.traffic.dispatches
    assert not world.board.traffic.attempts
    assert world.own() == 0, "leases that nobody returned"
    assert world.board.fleet.index.coming == 0
    assert len(world.board.reception.queue) == 0
    tally = world.board.traffic.tally
    assert tally.arrived == tally.ended == len(world.outcomes)
    per_choice: dict[tuple[str, int], int] = {}
    for _, sent in world.submits:
        per_choice[sent.request_id, sent.choice] = per_choice.get((sent.request_id, sent.choice), 0) + 1
    assert max(per_choice.values()) <= 1 + Bounds().moves_max + 3, "moves and bounces are bounded"


def test_every_choice_has_one_outcome_and_its_own_tokens() -> None:
    """And the chaos really disturbs, or it would show nothing."""
    disturbed: Counter[str] = Counter()

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 10**6))
    def holds(seed: int) -> None:
        world, closed, stopped = chaos(seed)
        disturbed["moves"] += world.board.traffic.tally.moves
        disturbed["losses"] += sum(notice.event == "replica lost" for notice in world.notices)
        check_whole(world, closed, stopped)

    holds()
    assert disturbed["moves"] > 20
    assert disturbed["losses"] > 5


def test_without_the_emitted_tokens_a_move_would_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Dispatch.send

    def forgetful(self: Dispatch, index: int, *rest: object) -> object:
        kept, self.streams[index].emitted = self.streams[index].emitted, []
        effects = send(self, index, *rest)  # type: ignore[arg-type]
        self.streams[index].emitted = kept
        return effects

    monkeypatch.setattr(Dispatch, "send", forgetful)
    with pytest.raises(AssertionError, match="lost or doubled"):
        for seed in range(12):
            world, closed, stopped = chaos(seed)
            for outcome in world.outcomes.values():
                check(outcome, closed, stopped)
