"""Strict priority inside a step: who goes on, who starts and who yields, in exact steps."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from core_harness import Driver, PagedRunner, ids, limits

from replica import making_room, scheduler
from replica.config import EngineConfig
from replica.contract.messages import FinishReason, GenerateRequest, SamplingParams
from replica.engine import Engine
from replica.kv_manager import KvManager
from replica.mock_runner import MockRunner
from replica.rehearsal import Rehearsal
from replica.request import History, Request
from replica.roster import Roster
from replica.scheduling_policy import BYPASSES_MAX, SHARED_WAITS_MAX, SchedulingPolicy
from replica.starting import Starting

# --- a partly computed prompt holds pages, so it moves however many more urgent ones come ---------------------------------


def moves_of_the_less_urgent(steps: int) -> list[int]:
    """Steps (from 1) with a chunk of a prompt of 640 tokens, while an urgent one fills every step of 64."""
    driver = Driver(PagedRunner(limits(1024, budget=64)), check=False, scheduling_policy="priority", enable_prefix_caching=False)
    driver.add(ids(1, 640), 1, priority=9)
    for i in range(steps):
        driver.step()
        driver.add(ids(100 + i, 64), 1, priority=0)
    return [i for i, step in enumerate(driver.runner.steps, 1) if any(row.request == 0 for row in step.rows)]


def test_a_partly_computed_prompt_stands_still_no_longer_than_the_bound() -> None:
    assert moves_of_the_less_urgent(300) == [1 + i * (BYPASSES_MAX + 1) for i in range(10)]


def test_without_the_bound_it_never_moves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulingPolicy, "is_overdue", lambda policy, request: False)
    assert moves_of_the_less_urgent(300) == [1]


def test_two_that_stood_still_move_one_after_the_other() -> None:
    driver = Driver(PagedRunner(limits(1024, budget=64)), scheduling_policy="priority", long_prefill_token_threshold=32)
    for i in range(2):
        driver.add(ids(1 + i, 320), 1, priority=9)
    driver.step()
    for request in driver.engine.roster.running:
        request.history.left_out = BYPASSES_MAX + request.number  # the second for longer
    driver.add(ids(7, 320), 1, priority=0)
    driver.step()
    assert [(row.request, len(row.tokens)) for row in driver.runner.steps[-1].rows] == [(1, 32), (0, 32)]
    driver.step()
    assert [(row.request, len(row.tokens)) for row in driver.runner.steps[-1].rows] == [(2, 32), (0, 32)]
    driver.run()


def rows_of_three_classes() -> list[int]:
    """Numbers in the step after one of priority 5 has come to two partly computed of 0 and 9: there are tokens for two."""
    options = {"scheduling_policy": "priority", "long_prefill_token_threshold": 16}
    driver = Driver(PagedRunner(limits(1024, budget=32)), **options)
    driver.add(ids(1, 200), 1, priority=0)
    driver.add(ids(2, 200), 1, priority=9)
    driver.step()
    driver.add(ids(3, 200), 1, priority=5)
    driver.step()
    rows = [row.request for row in driver.runner.steps[-1].rows]
    driver.run()
    return rows


def test_who_waits_goes_before_a_less_urgent_prompt_that_is_partly_computed() -> None:
    assert rows_of_three_classes() == [0, 2]


def test_without_a_start_between_two_classes_the_less_urgent_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = Starting.start_in_order

    def not_between(starting: Starting, below: int | None = None) -> None:
        if below is None:
            in_order(starting)

    monkeypatch.setattr(Starting, "start_in_order", not_between)
    assert rows_of_three_classes() == [0, 1]


# --- nobody yields where the step has no token for whom it would yield to ------------------------------------------------


def yielded_to_one_without_tokens() -> tuple[int, int]:
    """Preemptions in the step after one of priority 1 has come, and at the end; the two slots are taken by a prompt of
    priority 0, which needs all 4 tokens of a step, and a less urgent decode."""
    driver = Driver(PagedRunner(limits(256, seqs=2, budget=4)), scheduling_policy="priority")
    driver.add(ids(1, 3), 60, priority=9)
    driver.step()
    driver.add(ids(2, 40), 1, priority=0)
    driver.step()
    driver.add(ids(3, 8), 2, priority=1)
    driver.step()
    then = driver.engine.roster.preemptions
    driver.run()
    return then, driver.engine.roster.preemptions


def test_nobody_yields_to_one_for_whom_the_step_has_no_token() -> None:
    assert yielded_to_one_without_tokens() == (0, 0)  # and once the prompt of priority 0 is computed, its slot is free


def test_without_the_rehearsal_it_yields_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsal, "gets_a_chunk", lambda rehearsal, start, staying, started: True)
    assert yielded_to_one_without_tokens() == (1, 1)


def yielded_beside(kind: str) -> int:
    """Preemptions in the step after an urgent one has come to slots that are all taken, the last by a less urgent decode."""
    options = {
        "partials": {"max_num_partial_prefills": 1, "long_prefill_token_threshold": 16},
        "writer": {"long_prefill_token_threshold": 16},
    }
    decodes, budget = (2, 4) if kind == "overdue" else (1, 64)
    driver = Driver(PagedRunner(limits(1024, seqs=decodes + 1, budget=budget)), scheduling_policy="priority", **options.get(kind, {}))
    for i in range(decodes):
        driver.add(ids(10 + i, 3), 200, priority=9)
        driver.step()
    driver.add(ids(2, 2000), 1, priority=5 if kind == "overdue" else 0)
    driver.step()
    roster = driver.engine.roster
    assert [request.remaining for request in roster.running[:-1]] == [1] * decodes and not roster.free_slots
    if kind == "overdue":
        roster.running[-1].history.left_out = BYPASSES_MAX
    prompt = {"partials": ids(7, 100), "writer": [*ids(2, 90), *ids(7, 9)]}.get(kind, ids(7, 8))
    driver.add(prompt, 1, priority=0 if kind == "short" else 1)
    driver.step()
    return roster.preemptions


@pytest.mark.parametrize(
    ("kind", "preemptions"),
    [
        ("partials", 0),  # it would be the second that is partly computed, and one may be
        ("writer", 0),  # it stands back for a block that the prompt of priority 0 is about to write
        ("overdue", 0),  # a prompt that stood still for too long takes all that the step has left
        ("short", 1),  # it is computed in the half of the step that short prompts have
    ],
)
def test_somebody_yields_only_where_the_urgent_one_starts(kind: str, preemptions: int) -> None:
    assert yielded_beside(kind) == preemptions


def yielded_beside_a_writer(
    *, writer: int = 5, urgent: int = 0, shared: int = 90, steps: int = 1, scored: bool = False, **options: object
) -> int:
    """Preemptions in `steps` steps after an urgent one has come that begins as a partly computed prompt does, which writes a block a step.

    The slots are taken by that one and a less urgent decode."""
    engine = {"scheduling_policy": "priority", "long_prefill_token_threshold": 16, **options}
    driver = Driver(PagedRunner(limits(1024, seqs=2, budget=64)), **engine)
    driver.add(ids(1, 3), 200, priority=9)
    driver.step()
    driver.add(ids(2, 2000), 1, priority=writer)
    driver.step()
    scoring = {"prompt_logprobs": 1} if scored else {}
    driver.add([*ids(2, shared), *ids(7, 9)], 1, priority=urgent, **scoring)
    for _ in range(steps):
        driver.step()
    started = [row.request for row in driver.runner.steps[-1].rows]
    assert (2 in started) == bool(driver.engine.roster.preemptions)
    return driver.engine.roster.preemptions


@pytest.mark.parametrize(
    ("preemptions", "case"),
    [
        (1, {"writer": 5, "urgent": 0}),  # it starts before the prompt that would write its block goes on
        (0, {"writer": 5, "urgent": 5}),  # after it: that block is worth waiting for
        (0, {"writer": 0, "urgent": 5}),
        (1, {"writer": 0, "urgent": 5, "enable_prefix_caching": False}),  # no block is ever shared
        (1, {"writer": 0, "urgent": 5, "scored": True}),  # it computes every token itself
    ],
)
def test_somebody_yields_to_one_that_need_not_stand_back(preemptions: int, case: dict[str, int]) -> None:
    assert yielded_beside_a_writer(**case) == preemptions


def test_it_stands_back_as_often_as_the_bound_says_and_then_somebody_yields() -> None:
    waited = {"writer": 0, "urgent": 5, "shared": 1600}
    assert yielded_beside_a_writer(**waited, steps=SHARED_WAITS_MAX) == 0
    assert yielded_beside_a_writer(**waited, steps=SHARED_WAITS_MAX + 1) == 1


def test_a_wait_that_is_not_counted_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(History, "stand_back", lambda history, step_id: None)
    assert yielded_beside_a_writer(writer=0, urgent=5, shared=1600, steps=SHARED_WAITS_MAX + 1) == 0


def test_who_stands_back_in_the_step_gets_nobodys_place_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the tests above: the place is taken, and the step does not start it."""
    monkeypatch.setattr(Rehearsal, "stands_back", lambda rehearsal, start, staying, started: False)
    with pytest.raises(AssertionError):
        yielded_beside_a_writer(writer=0, urgent=5)


def yields_in_vain(seed: int, patch: pytest.MonkeyPatch, *, alike: bool = False) -> tuple[int, int]:
    """Of a random mix with a small token budget: yields to urgent ones, and those after which nobody more urgent started.

    `alike`: prompts begin with the same tokens."""
    random = Random(seed)
    block = random.choice((1, 4, 16))
    runner = MockRunner(limits(random.randint(60, 160) // block, block=block, seqs=random.randint(2, 6), budget=random.randint(4, 8)))
    config = EngineConfig(
        scheduling_policy="priority",
        inter_token_slo_ms=random.choice((0.001, 9.0, 200.0)),
        long_prefill_token_threshold=random.choice((0, 5)),
        max_num_partial_prefills=random.randint(1, 3),
    )
    engine = Engine(runner, config, "m", "r", lambda: 0.0)
    yielded: dict[int, list[int]] = {}
    most_urgent: dict[int, int] = {}
    preempt, start, make_room = Roster.preempt, Roster.start, making_room.make_room_for_urgent

    def note_yield(roster: Roster, request: Request) -> None:
        yielded.setdefault(roster.step_id, []).append(request.priority)
        preempt(roster, request)

    def note_start(roster: Roster, request: Request, match: object) -> object:
        most_urgent[roster.step_id] = min(request.priority, most_urgent.get(roster.step_id, request.priority))
        return start(roster, request, match)  # type: ignore[arg-type]

    def for_urgent(roster: Roster, rehearsal: Rehearsal) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Roster, "preempt", note_yield)
            make_room(roster, rehearsal)

    patch.setattr(Roster, "start", note_start)
    patch.setattr(scheduler, "make_room_for_urgent", for_urgent)
    for i in range(20):
        prompt = tuple(ids(random.choice((i + 9, i % 3)), random.randint(1, 40)))
        if alike:
            prompt = (*ids(random.randint(1, 2), 30), *prompt[:9])
        scores = random.choice((None, None, 1))
        sampling = SamplingParams(seed=i, max_tokens=random.randint(1, 16), ignore_eos=True, prompt_logprobs=scores)
        message = GenerateRequest(i, str(i), 0, prompt, (), sampling, priority=random.randint(-1, 2))
        assert engine.submit(0, message) is None
        for _ in range(random.randint(0, 3)):
            engine.step()
    while engine.has_work:
        engine.step()
    patch.undo()
    everybody = [(step, priority) for step, priorities in yielded.items() for priority in priorities]
    return len(everybody), sum(most_urgent.get(step, priority) >= priority for step, priority in everybody)


def test_in_random_mixes_nobody_yields_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [yields_in_vain(seed, monkeypatch) for seed in range(100)]
    assert sum(yields for yields, _ in found) > 60 and sum(vain for _, vain in found) == 0


def test_in_random_mixes_of_prompts_that_begin_alike_nobody_yields_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [yields_in_vain(seed, monkeypatch, alike=True) for seed in range(120)]
    assert sum(yields for yields, _ in found) > 60 and sum(vain for _, vain in found) == 0


def test_in_random_mixes_some_would_yield_to_one_that_stands_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsal, "stands_back", lambda rehearsal, start, staying, started: False)
    with pytest.MonkeyPatch.context() as patch:
        assert sum(yields_in_vain(seed, patch, alike=True)[1] for seed in range(120)) > 1


def test_in_random_mixes_without_the_rehearsal_some_yield_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsal, "gets_a_chunk", lambda rehearsal, start, staying, started: True)
    with pytest.MonkeyPatch.context() as patch:
        assert sum(yields_in_vain(seed, patch)[1] for seed in range(20)) > 5


# --- what starts is counted with the blocks it shares --------------------------------------------------------------------


def yields_for_two(blocks: int, slots: int, urgent: Sequence[Sequence[int]], *, cached: bool = False, also: int = 3) -> list[int]:
    """Numbers of those preempted in the step after two urgent ones have come to a less urgent decode of 10 full blocks and one more
    (`cached`: it has left), beside which two more urgent decodes run, the first with a prompt of `also` tokens."""
    driver = Driver(PagedRunner(limits(blocks, seqs=slots, budget=512)), scheduling_policy="priority")
    driver.add(WRITTEN, 1 if cached else 40, priority=9)
    driver.step()
    driver.add(ids(2, also), 100, priority=8)
    driver.add(ids(3, 3), 100, priority=7)
    driver.step()
    for priority, prompt in enumerate(urgent):
        driver.add(prompt, 1, priority=priority)
    driver.step()
    yielded = [request.number for request in driver.engine.roster.waiting if request.history.preemptions]
    driver.run()
    return sorted(yielded)


WRITTEN = ids(1, 160)
SHARING = [[*WRITTEN, *ids(4, 25)], [*WRITTEN, *ids(5, 25)]]  # 10 blocks with what is written, and 2
OTHER = ids(6, 185)


def test_a_hit_in_a_page_of_one_that_has_yielded_is_counted_for_the_next() -> None:
    assert yields_for_two(21, 3, [SHARING[0], OTHER]) == [0]


def test_with_what_was_found_before_he_yielded_another_yields_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(making_room, "_matched_anew", lambda roster, started: started)
    monkeypatch.setattr(making_room, "_takes", lambda pool, starts: [(request, match.needed) for request, match in starts])
    assert yields_for_two(21, 3, [SHARING[0], OTHER]) == [0, 1]


def test_a_page_that_is_copied_now_that_there_is_room_is_counted_for_the_next() -> None:
    assert yields_for_two(13, 3, [WRITTEN, ids(6, 20)]) == [0]


def test_without_another_look_the_copied_page_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(making_room, "_matched_anew", lambda roster, started: started)
    assert yields_for_two(13, 3, [WRITTEN, ids(6, 20)]) == [0, 1]


def test_a_page_that_one_about_to_start_shares_does_not_come_back() -> None:
    assert yields_for_two(21, 5, [SHARING[0], OTHER]) == []
    assert yields_for_two(26, 5, [SHARING[0], OTHER]) == [0]  # one page of his is not shared, and one is lacking


def test_what_two_share_is_counted_once() -> None:
    assert yields_for_two(27, 5, SHARING, cached=True, also=150) == []
    assert yields_for_two(27, 5, [SHARING[0], OTHER], cached=True, also=150) == [1]


def test_pages_shared_with_one_that_has_left_come_back_too() -> None:
    driver = Driver(PagedRunner(limits(18, seqs=4, budget=512)), scheduling_policy="priority")
    driver.add(WRITTEN, 3, priority=9)
    driver.step()
    driver.add(SHARING[0], 4, priority=9)
    for _ in range(3):
        driver.step()
    (left_over,) = driver.engine.roster.running
    assert left_over.history.own_blocks == 2 and len(left_over.blocks) == 12  # of which 10 were another's
    driver.add(OTHER, 1, priority=0)
    driver.step()
    assert left_over.history.preemptions == 1
    driver.run()


def test_who_was_given_a_place_starts_also_where_there_is_no_page_to_copy_its_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the random mixes; the copy is possible only since somebody has yielded, and takes a page more."""
    assert yields_in_vain(94, monkeypatch)[1] == 0
    monkeypatch.setattr(KvManager, "without_copy", lambda kv, match: match)  # negative control
    with pytest.MonkeyPatch.context() as patch:
        assert yields_in_vain(94, patch)[1] == 1


# --- a scored prompt moves by a token a step, whatever the budget --------------------------------------------------------


@pytest.mark.parametrize(("budget", "decodes", "steps"), [(1, 0, 41), (2, 1, 41), (3, 2, 41), (3, 1, 21)])
def test_a_scored_prompt_takes_what_the_decodes_leave(budget: int, decodes: int, steps: int) -> None:
    """Steps until a prompt of 40 is scored and has its two tokens."""
    driver = Driver(PagedRunner(limits(budget=budget)))
    for i in range(decodes):
        driver.add(ids(1 + i, 1), 300)
        driver.step()
    attempt = driver.add(ids(9, 40), 2, prompt_logprobs=1)
    for _ in range(steps - 1):
        driver.step()
    assert driver.engine.ledger.find(0, attempt) is not None
    driver.step()
    assert driver.finish(attempt) is FinishReason.LENGTH
    (first,) = [delta for delta in driver.heard[0, attempt].deltas if delta.prompt_logprobs]
    scores = first.prompt_logprobs
    assert scores is not None and [score.token_id if score else None for score in scores] == [None, *ids(9, 40)[1:]]
