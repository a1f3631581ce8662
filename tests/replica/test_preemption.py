"""Who yields, how often, and that nobody's text changes by it."""

from __future__ import annotations

import pytest
from core_harness import Driver, PagedRunner, ids, limits

from replica import making_room, victim
from replica.kv_manager import KvManager
from replica.making_room import make_room_for_growth
from replica.request import Request, State
from replica.roster import Roster
from replica.victim import PREEMPTIONS_MAX, choose_lower, choose_victim


def crowd(blocks: int, count: int = 12, max_tokens: int = 200, **sampling: object) -> Driver:
    """`count` requests of 60 tokens that grow more than the engine has learned to expect."""
    driver = Driver(PagedRunner(limits(blocks, seqs=12)))
    driver.engine.roster.growth.learn(20)
    for i in range(count):
        driver.add(ids(i, 60), max_tokens, **{"ignore_eos": False, **sampling})
    driver.run()
    return driver


def test_preempted_output_equals_undisturbed_output() -> None:
    small, large = crowd(90), crowd(4096)
    assert small.engine.roster.preemptions > 0 and large.engine.roster.preemptions == 0
    for attempt in range(1, 13):
        assert small.text(attempt) == large.text(attempt)
        assert len(small.text(attempt)) == 200
        assert small.finish(attempt) is large.finish(attempt)


@pytest.mark.parametrize("times", [1, 3])
def test_everyone_may_be_preempted_at_any_moment(times: int) -> None:
    """A hook preempts each request `times` times, at different places, in the middle of a chunked prefill too."""
    calm, disturbed = Driver(PagedRunner(limits(budget=32))), Driver(PagedRunner(limits(budget=32)))
    for driver in (calm, disturbed):
        for i in range(6):
            driver.add(ids(i, 70), 40, seed=5, temperature=1.0)
    calm.run()
    count = 0
    while disturbed.engine.has_work:
        disturbed.step()
        running = disturbed.engine.roster.running
        if running and count < 6 * times and len(disturbed.runner.steps) % 3 == 0:
            disturbed.engine.roster.preempt(running[count % len(running)])
            disturbed.engine.check()
            count += 1
    assert count == 6 * times
    assert [disturbed.text(attempt) for attempt in range(1, 7)] == [calm.text(attempt) for attempt in range(1, 7)]


def test_output_stays_output_after_a_preemption() -> None:
    """Penalties, min and max tokens look at the same prompt and output as before: the runner checks prompt + output itself."""
    driver = Driver(PagedRunner(limits()))
    attempt = driver.add(ids(1, 50), 40, ignore_eos=False, min_tokens=30)
    driver.runner.stop_at[attempt] = 35
    for _ in range(20):
        driver.step()
    request = driver.engine.ledger.find(0, attempt)
    assert request is not None
    driver.engine.roster.preempt(request)
    driver.run()
    draws = [row.draw for step in driver.runner.steps for row in step.rows if row.draw is not None]
    assert all(len(draw.prompt_ids) == 50 for draw in draws)
    assert len(driver.text(attempt)) == 36 and driver.heard[(0, attempt)].deltas[-1].stop_id == 2
    assert sum(1 for delta in driver.heard[(0, attempt)].deltas if delta.cached_tokens is not None) == 1


def test_losing_the_output_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a preemption that forgets the last token changes the text."""
    release = Roster.release

    def forgetful(roster: Roster, request: Request, to: State) -> None:
        if to is State.PREEMPTED and request.output_ids:
            request.output_ids.pop()
            request.tokens.pop()
        release(roster, request, to)

    monkeypatch.setattr(Roster, "release", forgetful)
    lossy = crowd(90)
    monkeypatch.undo()
    assert any(len(lossy.text(attempt)) != 200 for attempt in range(1, 13))


def test_an_urgent_request_takes_a_slot_at_once() -> None:
    driver = Driver(PagedRunner(limits(seqs=2)), scheduling_policy="priority")
    low = [driver.add(ids(i, 20), 300, priority=10) for i in range(2)]
    for _ in range(5):
        driver.step()
    urgent = driver.add(ids(9, 20), 5, priority=0)
    driver.step()
    assert len(driver.text(urgent)) == 1
    driver.run()
    assert all(len(driver.text(attempt)) == 300 for attempt in low)


def test_under_fcfs_priorities_mean_nothing() -> None:
    driver = Driver(PagedRunner(limits(seqs=2)))
    for i in range(2):
        driver.add(ids(i, 20), 50, priority=10)
    driver.step()
    driver.add(ids(9, 20), 5, priority=0)
    driver.run()
    assert driver.engine.roster.preemptions == 0


def test_an_urgent_request_takes_pages_but_not_from_equals() -> None:
    driver = Driver(PagedRunner(limits(20)), scheduling_policy="priority")
    driver.add(ids(1, 200), 100, priority=10)
    driver.step()
    equal = driver.add(ids(2, 200), 4, priority=10)
    driver.step()
    assert (0, equal) not in driver.heard and driver.engine.roster.preemptions == 0
    urgent = driver.add(ids(3, 200), 4, priority=0)
    driver.step()
    assert len(driver.text(urgent)) == 1 and driver.engine.roster.preemptions == 1
    driver.run()


def test_an_urgent_prompt_does_not_wait_for_less_urgent_ones_to_be_computed() -> None:
    driver = Driver(PagedRunner(limits(1024)), scheduling_policy="priority", max_num_partial_prefills=1)
    low = driver.add(ids(1, 3000), 1, priority=10)
    driver.step()
    urgent = driver.add(ids(2, 500), 1, priority=0)
    driver.step()
    driver.step()
    assert len(driver.text(urgent)) == 1 and driver.engine.roster.preemptions == 0
    driver.run()
    assert len(driver.text(low)) == 1


def test_nobody_yields_in_vain() -> None:
    """What is urgent needs more than all the less urgent hold: nobody is preempted for it."""
    driver = Driver(PagedRunner(limits(40)), scheduling_policy="priority")
    driver.add(ids(1, 320), 200, priority=0)
    driver.add(ids(2, 100), 60, priority=10)
    driver.step()
    driver.step()
    driver.add(ids(3, 480), 4, priority=0)
    driver.step()
    assert driver.engine.roster.preemptions == 0
    driver.run()


def test_nobody_yields_in_vain_beside_one_that_is_exempt() -> None:
    """Together the less urgent hold enough, but the larger one has yielded often enough already."""
    driver = Driver(PagedRunner(limits(40)), scheduling_policy="priority")
    exempt = driver.add(ids(1, 320), 60, priority=10)
    driver.add(ids(2, 100), 60, priority=10)
    driver.step()
    driver.step()
    assert [request.terms.attempt for request in driver.engine.roster.running] == [1, 2]
    driver.engine.roster.running[exempt - 1].history.preemptions = PREEMPTIONS_MAX
    driver.add(ids(3, 480), 4, priority=0)
    driver.step()
    assert driver.engine.roster.preemptions == 0
    driver.run()


def grown_beside_an_equal() -> tuple[int, bool]:
    """Preemptions, and whether the urgent one has started: the pages are there if one yields, but not for what its equal will grow to."""
    driver = Driver(PagedRunner(limits(11, block=4, seqs=2)), scheduling_policy="priority", enable_prefix_caching=False)
    driver.add(ids(1, 8), 20, priority=0)
    driver.add(ids(2, 8), 6, priority=9)
    driver.step()
    urgent = driver.add(ids(3, 16), 20, priority=0)
    driver.step()
    return driver.engine.roster.preemptions, (0, urgent) in driver.heard


def test_nobody_yields_to_one_that_would_not_start_for_the_growth_of_its_equals() -> None:
    assert grown_beside_an_equal() == (0, False)


def test_without_the_forecast_one_yields_and_the_urgent_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making_room, "_starts", lambda *decision: True)
    assert grown_beside_an_equal() == (1, False)


def prefix_of_the_victim() -> tuple[int, bool]:
    """As above: the less urgent one holds 5 pages of 12, an equal 3; the urgent one lacks 2, and 4 of those 5 are its own prefix."""
    driver = Driver(PagedRunner(limits(12, block=4)), scheduling_policy="priority")
    driver.add(ids(1, 9), 3, priority=0)
    driver.add(ids(2, 17), 3, priority=9)
    driver.step()
    urgent = driver.add([*ids(2, 16), *ids(3, 23)], 1, priority=0)
    driver.step()
    return driver.engine.roster.preemptions, (0, urgent) in driver.heard


def test_nobody_yields_for_pages_that_the_urgent_one_shares() -> None:
    assert prefix_of_the_victim() == (0, False)


def test_with_shared_pages_counted_one_yields_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making_room, "frozenset", lambda hits: (), raising=False)
    assert prefix_of_the_victim() == (1, False)


def test_two_that_do_not_fit_together_recompute_little() -> None:
    """Pool of 40 blocks, two requests that need 30 each in the end, 50 small ones."""
    for known in (True, False):
        driver = Driver(PagedRunner(limits(40, seqs=4)))
        for i in range(2):
            driver.add(ids(i, 300), 180, ignore_eos=known)
        needed = 2 * 479
        for i in range(50):
            driver.step()
            driver.add(ids(10 + i, 20), 4)
            needed += 23
        driver.run()
        assert driver.engine.roster.preemptions <= 4
        assert driver.tokens_computed() - needed <= 640


# --- the rule itself -----------------------------------------------------------------------------------------------------


def roster_of(*specifications: tuple[int, int, int]) -> list[Request]:
    """Running requests from (priority, computed tokens, preemptions), oldest first."""
    driver = Driver(PagedRunner(limits(1024, budget=4096, seqs=64)), scheduling_policy="priority", max_num_partial_prefills=64)
    for i, (priority, computed, _) in enumerate(specifications):
        driver.add(ids(i, computed), 50, priority=priority)
    driver.step()
    running = sorted(driver.engine.roster.running, key=lambda request: request.number)
    for request, (_, _, preemptions) in zip(running, specifications, strict=True):
        request.history.preemptions = preemptions
    return running


def computed(request: Request) -> int:
    return request.computed


@pytest.mark.parametrize(
    ("specifications", "victim"),
    [
        ([(0, 50, 0)], None),  # alone
        ([(0, 20, 0), (0, 50, 0), (0, 40, 0)], 2),  # the cheapest, but never the oldest
        ([(0, 20, 0), (0, 40, 0), (0, 40, 0)], 2),  # a tie: the youngest
        ([(0, 20, 0), (0, 40, 2), (0, 90, 0)], 2),  # exempt
        ([(0, 20, 0), (0, 40, 2), (0, 90, 2), (0, 70, 2)], 3),  # all exempt: the youngest
        ([(0, 20, 0), (5, 90, 0), (0, 30, 0)], 1),  # the least urgent class first, its oldest too if it has no other
        ([(5, 20, 0), (0, 10, 0), (5, 90, 0)], 2),
    ],
)
def test_victim(specifications: list[tuple[int, int, int]], victim: int | None) -> None:
    chosen = choose_victim(roster_of(*specifications), computed)
    assert (chosen.number if chosen else None) == victim


@pytest.mark.parametrize(
    ("specifications", "victim"),
    [
        ([(3, 50, 0)], None),  # an equal
        ([(4, 50, 0)], 0),
        ([(4, 50, 0), (9, 90, 0)], 1),
        ([(4, 50, 0), (9, 90, 2)], 0),  # exempt
        ([(9, 90, 2)], None),
    ],
)
def test_victim_for_an_urgent_one(specifications: list[tuple[int, int, int]], victim: int | None) -> None:
    chosen = choose_lower(roster_of(*specifications), 3, computed)
    assert (chosen.number if chosen else None) == victim


def test_blocks_that_others_hold_too_cost_nothing_to_redo() -> None:
    driver = Driver(PagedRunner(limits(budget=2048)))
    driver.add(ids(1, 160), 50)
    driver.step()
    driver.add([*ids(1, 160), *ids(2, 10)], 50)
    driver.step()
    older, younger = driver.engine.roster.running
    assert driver.engine.roster.redo_tokens(younger) == 10
    assert driver.engine.roster.redo_tokens(older) == older.computed - 160
    driver.run()


def most_preemptions(preemptions_max: int = PREEMPTIONS_MAX) -> int:
    """Of anybody, in a pool where all grow more than they are thought to, and somebody ends now and then."""
    counts: dict[int, int] = {}
    driver = Driver(PagedRunner(limits(30, seqs=12)), check=False)
    driver.engine.roster.growth.tokens_to_come = lambda request: 1  # type: ignore[method-assign]
    for i in range(12):
        driver.add(ids(i, 30), 40 + 17 * i, ignore_eos=False)
    while driver.engine.has_work:
        driver.step()
        for request in driver.engine.ledger.requests():
            counts[request.number] = request.history.preemptions
            exempt = sum(1 for other in driver.engine.roster.running if other.history.preemptions >= preemptions_max)
            assert request.history.preemptions <= preemptions_max or exempt
    return max(counts.values())


def test_no_one_is_preempted_more_than_twice_while_another_could_yield() -> None:
    assert most_preemptions() == PREEMPTIONS_MAX


def test_without_the_exemption_the_cheapest_yields_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(victim, "PREEMPTIONS_MAX", 10**9)
    assert most_preemptions(10**9) > PREEMPTIONS_MAX


def test_growth_that_fits_preempts_nobody() -> None:
    kv = KvManager(num_blocks=8, block_size=16, caching=True)
    driver = Driver(PagedRunner(limits()))
    assert not make_room_for_growth(driver.engine.roster, choose_victim)
    assert kv.pool.available == 8
