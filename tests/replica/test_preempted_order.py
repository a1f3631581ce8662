"""PRE-05: who comes back after a preemption, in which order, past whom and how often, in 500 random traces."""

from __future__ import annotations

from random import Random

import pytest
from core_harness import ids, limits

from replica.config import EngineConfig
from replica.contract.messages import GenerateRequest, SamplingParams
from replica.engine import Engine
from replica.kv_manager import Match
from replica.mock_runner import MockRunner
from replica.request import Request, State
from replica.roster import Roster
from replica.waiting_queue import WaitingQueue

K = 3  # bypasses


def place(request: Request) -> tuple[int, ...]:
    """The documented order, said once more: class, passed too often, preempted, what the queue prefers, arrival."""
    if request.history.bypasses >= K:
        return (request.priority, 0, request.number)
    return (request.priority, 1, request.state is not State.PREEMPTED, preference(request), request.number)


def preference(request: Request) -> int:
    return request.number * 7 % 5  # later ones start before earlier ones now and then, and are preempted before those have run


def trace(seed: int, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Starts of preempted requests past an earlier one that has never run, and the most that anybody has been passed.

    There are pages and tokens for everybody, so slots alone make them wait: each start has to be the first in the order.
    """
    random = Random(seed)
    runner = MockRunner(limits(512, block=4, seqs=2))
    config = EngineConfig(scheduling_policy="priority", enable_prefix_caching=False)
    engine = Engine(runner, config, "m", "r", lambda: 0.0)
    queue = engine.roster.waiting
    queue._bypasses_max, queue._rank = K, preference
    start = Roster.start
    past_new = 0
    most = 0

    def watched(roster: Roster, request: Request, match: Match) -> object:
        nonlocal past_new
        waiting = [other for other in roster.waiting if other.history.preempted_at_step != roster.step_id]
        assert min(waiting, key=place) is request, f"request {request.number} is not the first in the order"
        earlier = [other for other in waiting if other.priority == request.priority and other.number < request.number]
        past_new += request.state is State.PREEMPTED and any(other.state is State.WAITING for other in earlier)
        return start(roster, request, match)

    patch.setattr(Roster, "start", watched)
    for number in range(14):
        sampling = SamplingParams(seed=number, max_tokens=random.randint(1, 5), ignore_eos=True)
        message = GenerateRequest(number, "x", 0, tuple(ids(number, random.randint(2, 9))), (), sampling, priority=random.randint(0, 1))
        assert engine.submit(0, message) is None
    while engine.has_work:
        engine.step()
        running = engine.roster.running
        if running and random.random() < 0.3:
            engine.roster.preempt(random.choice(running))
        most = max([most, *(request.history.bypasses for request in engine.ledger.requests())])
    patch.undo()
    return past_new, most


def test_preempted_ones_come_first_in_their_class_and_pass_nobody_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [trace(seed, monkeypatch) for seed in range(500)]
    assert sum(past_new for past_new, _ in found) > 100
    assert max(most for _, most in found) == K


def test_in_the_order_of_arrival_alone_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WaitingQueue,
        "_place",
        lambda queue, request: (request.priority, 1 - queue.is_aged(request), 0, preference(request), request.number),
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="not the first in the order"):
        for seed in range(500):
            trace(seed, patch)


def test_without_the_bound_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "is_aged", lambda queue, request: False)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="not the first in the order"):
        for seed in range(500):
            trace(seed, patch)
