"""Public incidents as traces (case_trace), each with its guard off once; planned between steps, and one step ahead."""

from __future__ import annotations

from itertools import pairwise

import pytest
from case_trace import Replay, full_step_s, replay, sequence, step_s
from core_harness import Driver
from test_engine_sabotage import a_block_is_published_before_it_is_written

from replica.contract.messages import FinishReason
from replica.departures import Departures
from replica.kv_manager import KvManager
from replica.plan import PlanBuilder
from replica.request import Request
from replica.roster import Roster
from replica.scheduler import Scheduler
from replica.scheduling_policy import BYPASSES_MAX
from replica.victim import PREEMPTIONS_MAX

ahead = pytest.mark.parametrize("ahead", [False, True], ids=["between", "ahead"])


# --- scheduling ----------------------------------------------------------------------------------------------------------


@ahead
def test_sch_01_what_never_fits_is_refused_and_holds_nobody_up(ahead: bool) -> None:
    done = replay("SCH-01", async_scheduling=ahead)
    (big,) = done.told["big"]
    assert "301" in big.refused and "256" in big.refused
    assert done.finishes() == {FinishReason.LENGTH} and len(done.told) == 11
    stuck = [waiting > 0 and running == 0 for running, waiting in zip(done.running, done.waiting, strict=True)]
    assert not any(now and later for now, later in pairwise(stuck))


def test_sch_01_without_the_refusal_it_is_stuck() -> None:
    def take_all(driver: Driver) -> None:
        driver.engine._intake._context_tokens = 10**9

    with pytest.raises(AssertionError, match="work is left, but nothing runs"):
        replay("SCH-01", prepare=take_all)


def left_out(done: Replay) -> int:
    """Steps without somebody who had a token by then and wanted more."""
    count = 0
    drawn: dict[int, int] = {}
    lengths = {told.attempt - 1: told.message.sampling.max_tokens for choices in done.told.values() for told in choices}
    for step in done.driver.runner.steps:
        rows = {row.request for row in step.rows}
        count += any(0 < tokens < lengths[number] and number not in rows for number, tokens in drawn.items())
        for row in step.rows:
            drawn[row.request] = drawn.get(row.request, 0) + (row.draw is not None)
    return count


def chunk_gap_s(done: Replay) -> float:
    """99th percentile of the steps' durations while the four streams run."""
    gaps = sorted(step_s(step) for step in done.driver.runner.steps if any(row.request < 4 for row in step.rows))
    return gaps[int(0.99 * len(gaps))]


def many_tokens(driver: Driver) -> None:
    """A budget beyond what the SLO lets through: so it is the SLO alone that bounds the gap."""
    driver.engine._scheduler._budget_tokens = driver.runner.budget = 2048


@ahead
def test_sch_04_every_step_has_all_decodes_and_chunks_are_bounded(ahead: bool) -> None:
    done = replay("SCH-04", async_scheduling=ahead, inter_token_slo_ms=15.0)
    assert left_out(done) == 0 and done.finishes() == {FinishReason.LENGTH}
    assert chunk_gap_s(done) <= 2 * min(full_step_s(252, 4), 0.015)


@ahead
def test_sch_04_the_slo_alone_bounds_the_gap(ahead: bool) -> None:
    done = replay("SCH-04", prepare=many_tokens, async_scheduling=ahead, inter_token_slo_ms=15.0)
    assert left_out(done) == 0 and chunk_gap_s(done) <= 0.015


def test_sch_04_without_the_slo_the_gap_is_broken() -> None:
    assert chunk_gap_s(replay("SCH-04", prepare=many_tokens, inter_token_slo_ms=1e6)) > 2 * 0.015


def test_sch_04_a_decode_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = Scheduler._decodes

    def lazy(scheduler: Scheduler) -> tuple[PlanBuilder, list[Request]]:
        builder, partial = decodes(scheduler)
        if len(builder) > 3:
            builder._rows.pop()
            builder._requests.pop()
            builder._decodes -= 1
        return builder, partial

    monkeypatch.setattr(Scheduler, "_decodes", lazy)
    assert left_out(replay("SCH-04", until=lambda done: len(done.running) > 40)) > 0


def passed(bypasses_max: int, ahead: bool = False) -> int:
    """How many of the hot stream start before the cold request does (or at all), under longest cached prefix first."""

    def longest_prefix_first(driver: Driver) -> None:
        queue = driver.engine.roster.waiting
        queue._bypasses_max, queue._rank = bypasses_max, lambda request: -request.history.known_hits
        driver.add(sequence("H", 512), 1, owner=1)
        driver.run()
        driver.add([*range(3, 53)], 60, owner=1)  # two that hold the only slots: the hot ones come to a queue
        driver.add([*range(53, 103)], 60, owner=1)

    def cold_runs(done: Replay) -> bool:
        steps = done.driver.runner.steps
        return len(steps) > 900 or (len(steps) > 1 and any(row.request == 3 for row in steps[-1].rows))

    done = replay("SCH-06", prepare=longest_prefix_first, until=cold_runs, seqs=2, async_scheduling=ahead)
    return len({row.request for step in done.driver.runner.steps for row in step.rows} - {0, 1, 2, 3})


@ahead
def test_sch_06_a_cold_request_is_passed_no_more_than_the_bound(ahead: bool) -> None:
    assert 0 < passed(BYPASSES_MAX, ahead) <= BYPASSES_MAX


def test_sch_06_without_the_bound_it_starves() -> None:
    assert passed(10**9) > 3 * BYPASSES_MAX


@ahead
def test_sch_08_choices_and_tokens_never_exceed_their_limits(ahead: bool) -> None:
    """PagedRunner asserts both in every step."""
    done = replay("SCH-08", async_scheduling=ahead)
    assert max(len(step.rows) for step in done.driver.runner.steps) == 4 == max(done.running)
    assert done.finishes() == {FinishReason.LENGTH} and sum(map(len, done.told.values())) > 40


def test_sch_08_a_slot_too_many_is_seen() -> None:
    def one_more(driver: Driver) -> None:
        driver.engine.roster.slots = 5

    with pytest.raises(AssertionError, match="more rows than slots"):
        replay("SCH-08", prepare=one_more)


def scheduled_and_preempted(monkeypatch: pytest.MonkeyPatch, **engine: object) -> tuple[Replay, int, int]:
    """The replay, its preemptions, and how many of them hit a request with a row in the same step."""
    yielded: list[tuple[int, int]] = []
    preempt = Roster.preempt

    def record(roster: Roster, request: Request) -> None:
        yielded.append((roster.step_id, request.number))
        preempt(roster, request)

    monkeypatch.setattr(Roster, "preempt", record)
    done = replay("SCH-09", **engine)
    scheduled = {(step.step_id, row.request) for step in done.driver.runner.steps for row in step.rows}
    return done, len(yielded), len(scheduled & set(yielded))


@ahead
def test_sch_09_nobody_is_scheduled_and_preempted_in_one_step(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    done, preemptions, both = scheduled_and_preempted(monkeypatch, async_scheduling=ahead)
    assert preemptions > 0 and both == 0
    assert done.texts() == replay("SCH-09", blocks=1024, seqs=32).texts() and done.finishes() == {FinishReason.LENGTH}


def test_sch_09_a_victim_chosen_after_the_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = Scheduler._decodes

    def late(scheduler: Scheduler) -> tuple[PlanBuilder, list[Request]]:
        found = decodes(scheduler)
        if len(found[0]) > 5:
            scheduler._roster.preempt(scheduler._roster.running[0])
        return found

    monkeypatch.setattr(Scheduler, "_decodes", late)
    with pytest.raises(AssertionError, match="two rows write different tokens to one place"):
        scheduled_and_preempted(monkeypatch)


@ahead
def test_sch_12_two_that_do_not_fit_together_recompute_little(ahead: bool) -> None:
    preemptions: dict[int, int] = {}

    def count(driver: Driver) -> None:
        for request in driver.engine.ledger.requests():
            preemptions[request.number] = request.history.preemptions

    done = replay("SCH-12", after_step=count, async_scheduling=ahead)
    assert max(preemptions.values()) <= PREEMPTIONS_MAX and done.recomputed() == 0  # 640 are allowed
    assert done.finishes() == {FinishReason.LENGTH}


def test_sch_12_without_a_look_at_everybodys_growth_somebody_is_computed_again() -> None:
    def careless(driver: Driver) -> None:
        driver.engine.roster.growth.tokens_to_come = lambda request: 0  # type: ignore[method-assign]

    assert replay("SCH-12", prepare=careless).recomputed() > 320


# --- KV ------------------------------------------------------------------------------------------------------------------


def repeats(done: Replay) -> None:
    for length in (15, 16, 17, 31, 32, 33, 48):
        names = [f"p{length}_{i}" for i in range(4)]
        cached = [done.driver.cached(done.told[name][0].attempt) for name in names]
        assert done.text(names[0]) == done.text(names[1]) == done.text(names[2])
        for hit in cached[1:3]:
            assert (length - 1) // 16 * 16 <= hit <= length - 1
            assert hit == length - 1 or length % 16, "of whole blocks that are all cached one token is recomputed"
        assert cached[3] == length // 16 * 16


@ahead
def test_kvc_01_a_prompt_that_is_all_cached(ahead: bool) -> None:
    repeats(replay("KVC-01", async_scheduling=ahead))


def test_kvc_01_without_the_copy_a_block_is_recomputed() -> None:
    with pytest.raises(AssertionError, match="one token is recomputed"):
        repeats(replay("KVC-01", prepare=lambda driver: _never_copy(driver.engine.roster.kv)))


def _never_copy(kv: KvManager) -> None:
    match = kv.match

    def whole_blocks(request: Request) -> object:
        found = match(request)
        source = found.copy_source
        return found if source is None else type(found)(found.hits, None, found.fresh, found.pinned, len(found.hits) * 16, found.pending)

    kv.match = whole_blocks  # type: ignore[method-assign, assignment]


@ahead
def test_kvc_02_sharers_in_one_step_read_no_block_before_it_is_written(ahead: bool) -> None:
    done = replay("KVC-02", async_scheduling=ahead)
    alone = replay("KVC-02", seqs=1, enable_prefix_caching=False)
    assert done.texts() == alone.texts()
    assert done.driver.tokens_computed() < alone.driver.tokens_computed() - 7 * 128 + 1, "the prefix is computed once"
    first = {row.request: i for i, step in reversed(list(enumerate(done.driver.runner.steps))) for row in step.rows}
    assert max(first.values()) <= 2


def test_kvc_02_a_block_found_before_it_is_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    a_block_is_published_before_it_is_written(monkeypatch)
    with pytest.raises(AssertionError):
        replay("KVC-02", inter_token_slo_ms=0.001, long_prefill_token_threshold=16)


@ahead
def test_kvc_04_no_phantom_hits(ahead: bool) -> None:
    done = replay("KVC-04", async_scheduling=ahead)
    names = [name for name in done.told if name.startswith("P")]
    cached = [done.driver.cached(done.told[name][0].attempt) for name in names]
    assert len({tuple(done.text(name)) for name in names}) == 1
    assert cached[0] == 0 and cached[1] == 399 and all(hit < 399 for hit in cached[2:])  # its control: test_prefix_cache


@ahead
def test_kvc_10_whoever_leaves_frees_everything(ahead: bool) -> None:
    late: list[int] = []

    def gone_rows(driver: Driver) -> None:
        rows = {row.request for row in driver.runner.steps[-1].rows}
        late.append(len(rows - {request.number for request in driver.engine.ledger.requests()}))

    done = replay("KVC-10", after_step=gone_rows, async_scheduling=ahead)
    load = done.driver.engine.load()
    assert load.running == load.waiting == load.kv_bytes_used == 0 and done.driver.engine.roster.kv.pool.referenced == 0
    assert done.finishes() == {FinishReason.ABORT} and max(late) == 0


def test_kvc_10_a_cancel_that_is_not_heard_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Departures, "cancel", lambda self, request, *, defer: None)
    done = replay("KVC-10", until=lambda done: done.driver.now_s > 1.7)  # a second after the last has gone
    assert done.driver.engine.load().running > 0


# --- preemption ----------------------------------------------------------------------------------------------------------


@ahead
def test_pre_01_a_preempted_request_loses_and_repeats_nothing(ahead: bool) -> None:
    calm = replay("PRE-01", blocks=4096)
    natural = replay("PRE-01", batching="iteration")
    assert natural.driver.engine.roster.preemptions > 0 and natural.texts() == calm.texts()
    hooked: set[int] = set()

    def once_each(driver: Driver) -> None:
        for request in list(driver.engine.roster.running):
            if request.number not in hooked and len(request.output_ids) > 3 + request.number:
                hooked.add(request.number)
                driver.engine.roster.preempt(request)

    forced = replay("PRE-01", after_step=once_each, async_scheduling=ahead)
    assert len(hooked) == 12 and forced.texts() == calm.texts() and forced.finishes() == calm.finishes()
    assert all(len(text) == 200 for text in forced.texts().values())
