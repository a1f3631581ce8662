import msgspec
import pytest

from replica.contract.messages import LoadReport, StepTimeCoefficients
from router.policy.forecast import Forecast, Hit, fits, forecast, outlook
from router.policy.incarnation import Incarnation
from router.policy.load import Lease, ReplicaView
from router.policy.request_view import RequestView
from tests.router.modelled_replica import ModelledReplica, limits

STEP = StepTimeCoefficients(a=0.01, b=0.001, c=0.001, d=0.0)


def view(step_slo_s: float | None = None, **load: object) -> ReplicaView:
    replica = ModelledReplica("r0", truth=STEP, limits=limits(step_slo_s=step_slo_s, max_num_batched_tokens=100))
    one = ReplicaView(Incarnation("r0", 1), replica.welcome(), 0.0)
    one.report(msgspec.structs.replace(one.load, **{"predicted_step_s": 0.0, **load}), (), 0.0)
    return one


def expect(
    one: ReplicaView,
    tokens: int = 100,
    *,
    hit: Hit = Hit(),  # noqa: B008
    choices: int = 1,
    output: float = 100.0,
    now: float = 0.0,
    in_order: bool = False,
) -> Forecast:
    request = RequestView(tokens, (), 10, choices=choices, in_order=in_order)
    return forecast(one, request, hit, outlook(one, output, now))


def test_an_idle_replica_starts_at_once_and_prefills_in_chunks() -> None:
    one = expect(view(), 250)
    assert one.wait_s == 0.0
    assert one.ttft_s == pytest.approx(3 * 0.01 + 250 * 0.001)


def test_what_is_cached_is_not_prefilled_but_one_token_always_is() -> None:
    assert expect(view(), 160, hit=Hit(blocks=5)).new_tokens == 80
    assert expect(view(), 160, hit=Hit(blocks=10)).new_tokens == 1


def test_the_queue_comes_first_and_own_credit_counts_like_the_report() -> None:
    reported = view(queued_prefill_tokens=300, waiting=3)
    credited = view()
    for attempt in range(3):
        credited.lease(Lease(attempt, new_tokens=100, context_tokens=100, blocks=7, dispatched_s=0.0))
    assert expect(reported).wait_s > 0.3
    assert expect(credited).wait_s == pytest.approx(expect(reported).wait_s, rel=0.05)


def test_the_step_bound_makes_chunks_smaller_and_waits_longer() -> None:
    load = {"queued_prefill_tokens": 3000, "waiting": 3}
    assert expect(view(step_slo_s=0.05, **load)).wait_s > 1.1 * expect(view(**load)).wait_s


def test_so_does_a_step_time_that_varies() -> None:
    load = {"queued_prefill_tokens": 1_000, "running": 10}
    steady, varying = view(step_slo_s=0.05, **load), view(step_slo_s=0.05, step_spread=0.5, **load)
    assert expect(varying).wait_s > 1.1 * expect(steady).wait_s


def test_full_slots_are_waited_for() -> None:
    full = view(running=64, context_tokens=6400)
    one = expect(full)
    assert one.wait_s == pytest.approx(100 * 0.074 / 64)
    assert expect(full, choices=4).wait_s == pytest.approx(4 * one.wait_s)
    assert expect(view(running=63)).wait_s == pytest.approx(0.073), "the step that runs, and no more"


def test_missing_blocks_are_waited_for() -> None:
    assert expect(view(running=10, free_blocks=0, evictable_blocks=0), 8000).wait_s > 0.1
    assert expect(view(running=10, free_blocks=0, evictable_blocks=501), 8000).wait_s == pytest.approx(0.02), "the step that runs"


def test_a_popular_prefix_is_charged_to_all_who_will_use_it() -> None:
    lonely = expect(view(), 420, hit=Hit(blocks=0, shared_blocks=25, shared_uses=0.0))
    popular = expect(view(), 420, hit=Hit(blocks=0, shared_blocks=25, shared_uses=9.0))
    assert popular.ttft_s == lonely.ttft_s, "the promise is judged by the truth"
    assert popular.score_s == pytest.approx(lonely.score_s - 0.9 * 0.4)


def test_choices_count_and_so_do_other_prompts_of_the_batch() -> None:
    alone = RequestView(100, (), 10)
    twins = msgspec.structs.replace(alone, choices=8)
    others = msgspec.structs.replace(alone, choices=8, prompts=8, other_tokens=700)
    service = [forecast(view(), one, Hit(), outlook(view(), 100, 0.0)).service_s for one in (alone, twins, others)]
    assert service[0] < service[1] < service[2]
    assert service[2] == pytest.approx(8 * service[0])


# --- the step that runs -----------------------------------------------------------------------------------------------


def test_nothing_is_scheduled_before_the_step_that_runs_has_ended() -> None:
    one = view(running=1, waiting=1, queued_prefill_tokens=90)  # all of which that step computes
    assert expect(one, 10).wait_s == pytest.approx(0.011 + 0.0005 + 0.09, rel=0.01)
    assert expect(one, 10, now=0.06).wait_s == pytest.approx(0.0415, rel=0.02), "of which 60 ms are over"
    assert expect(one, 10, now=5.0).wait_s == 0.0
    own_s = expect(one, 10).ttft_s - expect(one, 10).wait_s
    assert own_s == pytest.approx(0.0115 + 0.01, rel=0.02), "what the step computes is not computed again in the next"


def test_an_idle_replica_begins_with_the_first_that_comes() -> None:
    one = view()
    one.lease(Lease(1, new_tokens=90, context_tokens=90, blocks=6, dispatched_s=0.0))
    assert expect(one, 10, now=0.04).wait_s == pytest.approx(0.0105 + 0.09 - 0.04, rel=0.02)
    one.lease(Lease(2, new_tokens=95, context_tokens=95, blocks=6, dispatched_s=0.01))  # comes too late for that step, and fits the next
    later = expect(one, 10, now=0.04)
    assert later.wait_s == pytest.approx(0.011 + 0.09 - 0.04, rel=0.02)
    assert later.ttft_s - later.wait_s == pytest.approx(0.011 + 0.105, rel=0.02)


def test_what_came_while_the_last_step_ran_begins_when_that_ends() -> None:
    one = view(progress=1)
    one.lease(Lease(1, new_tokens=90, context_tokens=90, blocks=6, dispatched_s=0.1))
    one.lease(Lease(2, new_tokens=10, context_tokens=10, blocks=1, dispatched_s=0.2))
    one.report(msgspec.structs.replace(one.load, progress=2), (), 1.0)  # it had nothing else
    expected = expect(one, 10, now=1.0)
    assert expected.wait_s == pytest.approx(0.011 + 0.1, rel=0.02), "both are in the step that begins now"
    assert expected.ttft_s - expected.wait_s == pytest.approx(0.012 + 0.01, rel=0.02)


# --- short prompts pass longer ones -----------------------------------------------------------------------------------


def test_a_short_prompt_passes_the_long_ones() -> None:
    queue = {"running": 1, "waiting": 4, "queued_prefill_tokens": 1_000}
    passes, keeps = view(**queue, short_prefill_tokens=0), view(**queue)
    a_step_s = 0.013 + 0.097
    assert expect(passes, 40).wait_s == pytest.approx(a_step_s, rel=0.02), "the step that runs"
    assert expect(passes, 40).ttft_s == pytest.approx(2 * a_step_s, rel=0.02), "its own step is full of a long one's tokens"
    assert expect(keeps, 40).wait_s > 0.9, "where the order is kept"
    for one in (passes, keeps):
        assert expect(one, 60).wait_s > 0.9, "half a step does not hold it"
        assert expect(one, 40, choices=2).wait_s > 0.9
        assert expect(one, 40, in_order=True).wait_s > 0.9


def test_who_passes_makes_no_replica_run_dry() -> None:
    one = view(running=1, waiting=4, queued_prefill_tokens=1_000, short_prefill_tokens=0)
    assert expect(one, 40).wait_s < 0.2 and expect(one, 40).after_s > 0.8, "of what waits for those who have time"
    assert expect(view(running=1), 40).after_s == 0.0
    assert expect(view(running=64, context_tokens=6400), 40).after_s > 0.0, "seats count"


def test_those_as_short_keep_their_order() -> None:
    queue = {"running": 1, "waiting": 9, "queued_prefill_tokens": 2_000}
    none, some = (expect(view(**queue, short_prefill_tokens=short), 10) for short in (0, 200))
    assert some.wait_s == pytest.approx(none.wait_s * 4, rel=0.1), "half a chunk of them in a step, and in the one that runs"
    own = view(**queue, short_prefill_tokens=0)
    for attempt, tokens in enumerate((40, 40, 40, 1_000)):
        own.lease(Lease(attempt, new_tokens=tokens, context_tokens=tokens, blocks=7, dispatched_s=0.01))
    assert expect(own, 10).wait_s == pytest.approx(none.wait_s * 3, rel=0.25), "of its own the router knows who is short"


def test_what_can_never_run_is_known_here_too() -> None:
    one = view()
    assert fits(one, RequestView(8191, (), 1))
    assert not fits(one, RequestView(8192, (), 1))
    assert not fits(one, RequestView(10, (), 1, choices=2, prompts=2, longest_tokens=8192))


def test_the_report_says_so_of_itself() -> None:
    assert isinstance(view().load, LoadReport)
