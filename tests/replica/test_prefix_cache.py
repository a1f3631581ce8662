"""Prefix caching through the engine: what is hit, what is recomputed, and that nobody reads a page before it is written."""

from __future__ import annotations

import dataclasses

import pytest
from core_harness import Driver, PagedRunner, ids, limits

from replica.block_pool import BlockPool
from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import FinishReason, Removed, Stored
from replica.kv_manager import KvManager, Match
from replica.request import Request

LENGTHS = (15, 16, 17, 31, 32, 33, 48)


def names(prompt: list[int]) -> tuple[bytes, ...]:
    return block_keys(root_key(model="m", revision="r"), prompt, 16)


@pytest.mark.parametrize("length", LENGTHS)
def test_repeating_a_prompt_hits_all_it_can_and_changes_no_text(length: int) -> None:
    driver = Driver(PagedRunner(limits()))
    prompt = ids(length, length)
    attempts = []
    for _ in range(3):
        attempts.append(driver.add(prompt, 8, seed=1))
        driver.run()
    assert driver.text(attempts[0]) == driver.text(attempts[1]) == driver.text(attempts[2])
    assert driver.cached(attempts[0]) == 0
    expected = length - 1 if length % 16 == 0 else length // 16 * 16
    assert driver.cached(attempts[1]) == driver.cached(attempts[2]) == expected
    longer = driver.add([*prompt, *ids(99, 16)], 8)
    driver.run()
    assert driver.cached(longer) == length // 16 * 16


@pytest.mark.parametrize("length", [16, 32, 256])
def test_a_fully_cached_prompt_of_whole_blocks_recomputes_one_token(length: int) -> None:
    driver = Driver(PagedRunner(limits()))
    driver.add(ids(1, length), 1)
    driver.run()
    before = driver.tokens_computed()
    driver.add(ids(1, length), 1)
    driver.run()
    assert driver.tokens_computed() - before == 1
    assert len(driver.runner.steps[-1].copies) == 1


def test_without_the_copy_a_whole_block_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    match = KvManager.match

    def whole_blocks_only(kv: KvManager, request: Request) -> Match:
        found = match(kv, request)
        return dataclasses.replace(found, copy_source=None, computed=len(found.hits) * kv.block_size)

    monkeypatch.setattr(KvManager, "match", whole_blocks_only)
    driver = Driver(PagedRunner(limits()))
    for _ in range(2):
        driver.add(ids(1, 256), 1)
        driver.run()
    assert driver.tokens_computed() == 256 + 16


def test_the_source_of_a_copy_cannot_be_evicted_before_the_step_is_done() -> None:
    driver = Driver(PagedRunner(limits(4)))
    driver.add(ids(1, 32), 1)
    driver.run()
    driver.add(ids(1, 32), 1)
    step = driver.engine.plan()
    assert step is not None and len(step.copies) == 1
    pool = driver.engine.roster.kv.pool
    source = step.copies[0].source
    assert pool.references(source) == 1 and step.copies[0].target != source
    runs = driver.engine.roster.running[0]
    assert runs.history.own_blocks == len(runs.blocks), "the source goes back before the request does"
    driver.engine.settle(step, driver.runner.execute(step))
    assert pool.references(source) == 0
    driver.engine.check()


def test_without_room_for_the_source_the_last_block_is_recomputed() -> None:
    driver = Driver(PagedRunner(limits(3)))
    driver.add(ids(1, 32), 1)
    driver.run()
    driver.add(ids(2, 5), 3)
    driver.step()
    driver.add(ids(1, 32), 0)
    driver.step()
    assert [len(row.tokens) for row in driver.runner.steps[-1].rows] == [1, 16] and not driver.runner.steps[-1].copies
    driver.run()


def test_requests_that_share_a_new_prefix_compute_it_once() -> None:
    driver = Driver(PagedRunner(limits(1024, budget=2048)))
    attempts = [driver.add([*ids(1, 1024), *ids(10 + i, 16)], 1) for i in range(8)]
    assert driver.run() == 2
    assert driver.tokens_computed() == 1024 + 8 * 16
    assert [driver.cached(attempt) for attempt in attempts] == [0] + [1024] * 7


def test_without_standing_back_the_prefix_is_computed_eight_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(KvManager, "announce", lambda kv, request, end: None)
    driver = Driver(PagedRunner(limits(1024, budget=16_384)))
    for i in range(8):
        driver.add([*ids(1, 1024), *ids(10 + i, 16)], 1)
    driver.run()
    assert driver.tokens_computed() == 8 * 1040


def test_sharers_follow_a_writer_of_many_chunks() -> None:
    driver = Driver(PagedRunner(limits(1024, budget=256)))
    for i in range(4):
        driver.add([*ids(1, 1024), *ids(10 + i, 16)], 1)
    driver.run()
    assert driver.tokens_computed() == 1024 + 4 * 16


def test_standing_back_is_bounded() -> None:
    driver = Driver(PagedRunner(limits(1024, budget=4096)), long_prefill_token_threshold=16)
    driver.add(ids(1, 1600), 1)
    sharer = driver.add([*ids(1, 1600), *ids(2, 5)], 1)
    started = 0
    while (0, sharer) not in driver.heard:
        driver.step()
        if len(driver.runner.steps[-1].rows) == 2 and not started:
            started = len(driver.runner.steps)
    assert started == 33


def test_shared_blocks_give_the_text_of_a_solo_cold_run() -> None:
    together = Driver(PagedRunner(limits(1024, budget=2048)))
    for round_number in range(5):
        prefix = ids(100 + round_number, 128)
        prompts = [[*prefix, *ids(10 + i, 5 + i)] for i in range(8)]
        attempts = [together.add(prompt, 16, seed=i) for i, prompt in enumerate(prompts)]
        together.run()
        for i, prompt in enumerate(prompts):
            alone = Driver(PagedRunner(limits(64, budget=2048)))
            solo = alone.add(prompt, 16, seed=i)
            alone.run()
            assert together.text(attempts[i]) == alone.text(solo)


def test_blocks_are_findable_and_told_when_their_step_has_completed_not_before() -> None:
    driver = Driver(PagedRunner(limits()))
    prompt = ids(1, 40)
    driver.add(prompt, 4)
    step = driver.engine.plan()
    assert step is not None
    assert all(driver.engine.roster.kv.pool.find(key) is None for key in names(prompt))
    assert driver.engine.snapshot() == ()
    output = driver.engine.settle(step, driver.runner.execute(step))
    first, second = names(prompt)
    root = root_key(model="m", revision="r")
    assert output.events == (Stored(keys=(first, second), parent=root),)
    assert driver.engine.snapshot() == ((first, root), (second, first))


def test_publishing_at_plan_time_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: the invariants see a block that is findable before it is written."""

    def publish_early(kv: KvManager, request: Request, end: int) -> None:
        full = end // kv.block_size
        kv.pool.publish(request.blocks[:full], request.keys[:full], request.terms.root)

    monkeypatch.setattr(KvManager, "announce", publish_early)
    driver = Driver(PagedRunner(limits()))
    driver.add(ids(1, 40), 4)
    driver.engine.plan()
    with pytest.raises(AssertionError, match="findable before it is written"):
        driver.engine.check()


@pytest.mark.parametrize("how", ["cancelled", "raises", "row error"])
def test_a_writer_that_fails_is_never_visible_and_its_sharers_compute_themselves(how: str) -> None:
    runner = PagedRunner(limits(budget=2048))
    driver = Driver(runner)
    prefix = ids(1, 128)
    writer = driver.add([*prefix, 5], 4, seed=1)
    sharers = [driver.add([*prefix, 6 + i], 4, seed=6 + i) for i in range(3)]
    step = driver.engine.plan()
    assert step is not None and len(step.rows) == 1
    driver.failures_expected = how == "raises"
    if how == "cancelled":
        driver.engine.cancel(0, writer)
    elif how == "raises":
        runner.raise_for = lambda step: "broken" if step.rows[0].request == 0 else ""
    else:
        runner.error_for = lambda row: "no grammar" if row.request == 0 else ""
    try:
        driver.take(driver.engine.settle(step, runner.execute(step)))
    except RuntimeError as error:
        driver.take(driver.engine.settle(step, error))
    assert driver.engine.snapshot() == ()
    assert driver.finish(writer) is (FinishReason.ABORT if how == "cancelled" else FinishReason.ERROR)
    driver.run()
    for i, attempt in enumerate(sharers):
        alone = Driver(PagedRunner(limits(budget=2048)))
        solo = alone.add([*prefix, 6 + i], 4, seed=6 + i)
        alone.run()
        assert driver.text(attempt) == alone.text(solo)


def pressure() -> tuple[Driver, list[list[int]], list[int]]:
    """Prefix P (25 blocks), P again, Q (38 blocks of 40), P, Q, P: the driver, the texts of P, its hits."""
    driver = Driver(PagedRunner(limits(40, context=640)))
    texts: list[list[int]] = []
    hits: list[int] = []
    for prompt in "PPQPQP":
        resident = sum(1 for key in names(ids(1, 400)) if driver.engine.roster.kv.pool.find(key) is not None)
        attempt = driver.add(ids(1, 400) if prompt == "P" else ids(2, 608), 8, seed=1)
        driver.run()
        if prompt == "P":
            texts.append(driver.text(attempt))
            hits.append(driver.cached(attempt))
            assert driver.cached(attempt) <= resident * 16
    return driver, texts, hits


def test_no_phantom_hits_after_eviction() -> None:
    driver, texts, hits = pressure()
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert hits[0] == 0 and hits[1] == 399 and hits[2] < hits[1]
    removed = [key for output in driver.outputs for event in output.events if isinstance(event, Removed) for key in event.keys]
    assert removed


def test_a_block_that_kept_its_key_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    allocate = BlockPool.allocate

    def keep_key(pool: BlockPool) -> int:
        key = pool._keys[pool._unreferenced.head()]
        block = allocate(pool)
        if key is not None:
            pool._index[key] = block
        return block

    monkeypatch.setattr(BlockPool, "allocate", keep_key)
    with pytest.raises(AssertionError):
        pressure()


def test_keys_from_the_router_are_used_only_if_there_is_one_per_full_block() -> None:
    driver = Driver(PagedRunner(limits()))
    prompt = ids(1, 40)
    driver.add(prompt, 1, block_keys=names(prompt)[:1])
    driver.run()
    again = driver.add(prompt, 1, block_keys=names(prompt))
    driver.run()
    assert {key for key, _ in driver.engine.snapshot()} == set(names(prompt))
    assert driver.cached(again) == 32


def test_salt_and_adapter_separate_caches() -> None:
    driver = Driver(PagedRunner(limits()))
    first = driver.add(ids(1, 48), 1, cache_salt=b"tenant a")
    driver.run()
    other = driver.add(ids(1, 48), 1, cache_salt=b"tenant b")
    adapted = driver.add(ids(1, 48), 1, adapter="x")
    driver.run()
    same = driver.add(ids(1, 48), 1, cache_salt=b"tenant a")
    driver.run()
    assert [driver.cached(attempt) for attempt in (first, other, adapted, same)] == [0, 0, 0, 47]


def test_without_prefix_caching_nothing_is_shared() -> None:
    driver = Driver(PagedRunner(limits()), enable_prefix_caching=False)
    for _ in range(2):
        attempt = driver.add(ids(1, 64), 4, seed=1)
        driver.run()
        assert driver.cached(attempt) == 0
    assert driver.engine.snapshot() == ()


def test_generated_tokens_are_cached_too() -> None:
    driver = Driver(PagedRunner(limits()))
    first = driver.add(ids(1, 20), 30, seed=1)
    driver.run()
    follow_up = driver.add([*ids(1, 20), *driver.text(first)], 4)
    driver.run()
    assert driver.cached(follow_up) == 48  # the last token drawn was never computed: 49 of 50 are, 3 whole blocks


def test_match_changes_nothing() -> None:
    kv = KvManager(num_blocks=4, block_size=16, caching=True)
    assert Match(hits=(), copy_source=None, fresh=1, pinned=2, computed=0, pending=False).needed == 3
    assert kv.pool.available == 4
