import pytest

from replica.contract.messages import FinishReason, SamplingParams, TokenDelta, TokenLogprobs
from router.dispatch import Bounds, Departure, Dispatch, Phase, tokens
from router.effects import CancelAttempt, Emit, Ended, Opened, Reject, Release, StreamEffect, Submit
from router.policy.incarnation import Incarnation
from router.ports import Batch
from tests.router.virtual_world import prompt_of, request

R0, R1, R2 = Incarnation("r0", 1), Incarnation("r1", 1), Incarnation("r2", 1)


def dispatch(choices: int = 1, bounds: Bounds = Bounds()) -> Dispatch:  # noqa: B008
    prompt = prompt_of(1, 20)
    return Dispatch(1, Batch("q", tuple(request("q", prompt, choice=i, max_tokens=10) for i in range(choices)), 0.0), bounds)


def emitted(effects: list[StreamEffect]) -> list[int]:
    return [token for effect in effects if isinstance(effect, Emit) for token in effect.delta.token_ids]


def submitted(effects: list[StreamEffect]) -> Submit:
    (submit,) = [effect for effect in effects if isinstance(effect, Submit)]
    return submit


def test_a_quiet_life() -> None:
    one = dispatch()
    assert submitted(one.send(0, R0, 1, now=0.5)).request.queued_s == 0.5
    assert one.accepted(0, 1) == [Opened(1)]
    first = one.delta(0, TokenDelta(1, (5,), cached_tokens=16, waited_s=0.25), 1.0)
    assert isinstance(first[0], Emit)
    assert (first[0].delta.cached_tokens, first[0].delta.queue_time_s) == (16, 0.75)
    last = one.delta(0, TokenDelta(1, (6,), finish=FinishReason.STOP, stop_id=6), 1.1)
    assert [type(effect) for effect in last] == [Release, Emit, Ended]
    assert one.delta(0, TokenDelta(1, (7,)), 1.2) == [], "nothing follows the end"


def test_tokens_may_come_before_the_acceptance_is_told() -> None:
    one = dispatch()
    one.send(0, R0, 1, 0.0)
    assert [type(effect) for effect in one.delta(0, TokenDelta(1, (5,)), 0.1)] == [Opened, Emit]


def test_tokens_and_nothing_else_are_told_in_the_same_words_by_the_short_way() -> None:
    short, long = dispatch(), dispatch()
    for one in (short, long):
        one.send(0, R0, 1, 0.0)
        one.delta(0, TokenDelta(1, (5,), cached_tokens=0, waited_s=0.0), 0.1)
    told = TokenDelta(1, (6, 7), (TokenLogprobs(6, -1.0), TokenLogprobs(7, -2.0)))
    assert [tokens(short, short.streams[0], told)] == long.delta(0, told, 0.2)
    assert short.streams == long.streams and short.streams[0].emitted == [5, 6, 7]


def test_the_short_way_is_for_the_present_attempt_of_a_stream_in_an_engine_and_for_tokens_alone() -> None:
    one = dispatch()
    (stream,) = one.streams
    one.send(0, R0, 1, 0.0)
    assert tokens(one, stream, TokenDelta(1, (5,))) is None, "not accepted yet: that is told first"
    one.accepted(0, 1)
    for more in (
        TokenDelta(1, (5,), finish=FinishReason.STOP),
        TokenDelta(1, (5,), cached_tokens=0),
        TokenDelta(1, (5,), waited_s=0.0),
        TokenDelta(1, (5,), prompt_logprobs=(None,)),
        TokenDelta(1),
        TokenDelta(2, (5,)),
    ):
        assert tokens(one, stream, more) is None, more
    one.depart(0, Departure.LOST, 0.2)
    assert tokens(one, stream, TokenDelta(1, (5,))) is None, "it has left"
    assert stream.emitted == [] and not one.yielded


def test_a_move_goes_on_from_what_was_passed_on_and_repeats_no_first_fact() -> None:
    one = dispatch()
    one.send(0, R0, 1, 0.0)
    one.delta(0, TokenDelta(1, (5, 6), cached_tokens=0, waited_s=0.0), 0.1)
    assert [type(effect) for effect in one.depart(0, Departure.LOST, 0.2)] == [Release, CancelAttempt]
    again = submitted(one.send(0, R1, 2, 0.3)).request
    assert again.emitted_ids == (5, 6)
    assert again.sampling.max_tokens == 10
    assert again.prompt_ids == one.batch.requests[0].prompt_ids
    assert one.delta(0, TokenDelta(1, (7,)), 0.4) == [], "the old attempt is fenced"
    (told,) = one.delta(0, TokenDelta(2, (7,), cached_tokens=16, waited_s=0.1), 0.5)
    assert isinstance(told, Emit)
    assert (told.delta.cached_tokens, told.delta.queue_time_s, told.delta.token_ids) == (None, None, (7,))


def test_without_the_fence_a_late_frame_would_double_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dispatch()
    one.send(0, R0, 1, 0.0)
    one.depart(0, Departure.LOST, 0.2)
    one.send(0, R1, 2, 0.3)
    late = TokenDelta(1, (5,))
    assert emitted(one.delta(0, late, 0.4)) == []
    one.streams[0].attempt = 1  # the guard switched off
    assert emitted(one.delta(0, late, 0.4)) == [5]


def test_facts_come_from_the_first_attempt_that_tells_them() -> None:
    one = dispatch()
    one.send(0, R0, 1, 0.0)
    one.depart(0, Departure.LOST, 0.2)
    one.send(0, R1, 2, 0.3)
    told = one.delta(0, TokenDelta(2, (5,), cached_tokens=3, waited_s=0.1), 0.5)[-1]
    assert isinstance(told, Emit)
    assert told.delta.cached_tokens == 3


def test_prompt_logprobs_are_not_asked_for_twice() -> None:
    prompt = prompt_of(1, 20)
    asked = request("q", prompt)
    scored = type(asked)(0, "q", 0, prompt, asked.block_keys, SamplingParams(seed=1, max_tokens=10, prompt_logprobs=2))
    one = Dispatch(1, Batch("q", (scored,), 0.0), Bounds())
    assert submitted(one.send(0, R0, 1, 0.0)).request.sampling.prompt_logprobs == 2
    one.delta(0, TokenDelta(1, (5,), prompt_logprobs=(None,), cached_tokens=0), 0.1)
    one.depart(0, Departure.LEAVING, 0.2)
    assert submitted(one.send(0, R1, 2, 0.3)).request.sampling.prompt_logprobs is None


def test_a_request_that_two_replicas_died_under_gets_no_third() -> None:
    one = dispatch()
    one.send(0, R0, 1, 0.0)
    one.delta(0, TokenDelta(1, (5,)), 0.1)
    one.depart(0, Departure.LOST, 0.2)
    one.send(0, R1, 2, 0.3)
    effects = one.depart(0, Departure.LOST, 0.4)
    finishes = [effect.delta.finish for effect in effects if isinstance(effect, Emit)]
    assert finishes == [FinishReason.ERROR]
    assert one.ended
    lenient = dispatch(bounds=Bounds(deaths_max=9))  # the guard switched off: it is given a third
    for attempt, where in enumerate((R0, R1)):
        lenient.send(0, where, attempt + 1, 0.0)
        lenient.depart(0, Departure.LOST, 0.1)
    assert lenient.streams[0].phase is Phase.ADRIFT


def test_a_stall_is_half_a_suspicion() -> None:
    """One death and one stall: it goes on; another stall, and it is given up."""
    one = dispatch()
    for attempt, (where, why) in enumerate([(R0, Departure.LOST), (R1, Departure.STALLED)], 1):
        one.send(0, where, attempt, 0.0)
        one.depart(0, why, 0.1)
        assert one.streams[0].phase is Phase.ADRIFT
    one.send(0, R2, 3, 0.2)
    one.depart(0, Departure.STALLED, 0.3)
    assert one.ended


def test_choices_on_different_replicas_count_together_for_the_poison_guard() -> None:
    one = dispatch(2)
    one.send(0, R0, 1, 0.0)
    one.send(1, R1, 2, 0.0)
    one.depart(0, Departure.LOST, 0.1)
    effects = one.depart(1, Departure.LOST, 0.1)
    (reject,) = [effect for effect in effects if isinstance(effect, Reject)]
    assert (reject.status, reject.reason) == (503, "replicas_lost")


def test_moves_are_bounded() -> None:
    one = dispatch()
    for attempt in range(1, 5):
        one.send(0, R0, attempt, 0.0)
        one.delta(0, TokenDelta(attempt, (attempt,)), 0.1)
        effects = one.depart(0, Departure.LEAVING, 0.2)
    assert one.ended
    assert [effect.delta.finish for effect in effects if isinstance(effect, Emit)] == [FinishReason.ERROR]


def test_nothing_is_left_to_generate_after_a_loss() -> None:
    one = dispatch()
    one.send(0, R0, 1, 0.0)
    one.delta(0, TokenDelta(1, tuple(range(10))), 0.1)
    effects = one.depart(0, Departure.LOST, 0.2)
    assert [effect.delta.finish for effect in effects if isinstance(effect, Emit)] == [FinishReason.LENGTH]


def test_before_the_first_emission_a_failure_rejects_the_whole_batch() -> None:
    one = dispatch(2)
    one.send(0, R0, 1, 0.0)
    one.send(1, R0, 2, 0.0)
    effects = one.fail(1, 400, "never_fits", "too long")
    assert [type(effect) for effect in effects] == [Release, CancelAttempt, Release, CancelAttempt, Reject, Ended]


def test_after_it_only_that_choice_ends() -> None:
    one = dispatch(2)
    one.send(0, R0, 1, 0.0)
    one.send(1, R0, 2, 0.0)
    one.delta(0, TokenDelta(1, (5,)), 0.1)
    effects = one.fail(1, 503, "no_replica", "gone")
    assert [effect.delta.index for effect in effects if isinstance(effect, Emit)] == [1]
    assert not one.ended
    assert [type(effect) for effect in one.delta(0, TokenDelta(1, (), finish=FinishReason.STOP), 0.2)] == [Release, Emit, Ended]


def test_an_abort_nobody_asked_for_is_a_move() -> None:
    one = dispatch()
    one.send(0, R0, 1, 0.0)
    one.delta(0, TokenDelta(1, (5,)), 0.1)
    one.delta(0, TokenDelta(1, (), finish=FinishReason.ABORT), 0.2)
    assert one.streams[0].phase is Phase.ADRIFT


def test_stop_and_close_are_legal_in_every_state_and_idempotent() -> None:
    for phase in (Phase.QUEUED, Phase.SENT, Phase.HELD, Phase.ADRIFT, Phase.DONE):
        one = dispatch()
        if phase is not Phase.QUEUED:
            one.send(0, R0, 1, 0.0)
        if phase in (Phase.HELD, Phase.ADRIFT):
            one.accepted(0, 1)
        if phase is Phase.ADRIFT:
            one.depart(0, Departure.LEAVING, 0.0)
        if phase is Phase.DONE:
            one.stop(0)
        assert one.streams[0].phase is phase
        cancels = [effect for effect in one.close() if isinstance(effect, CancelAttempt)]
        assert len(cancels) == (phase in (Phase.SENT, Phase.HELD))
        assert one.ended
        assert one.close() == []
        assert one.stop(0) == []


def test_an_illegal_move_raises() -> None:
    one = dispatch()
    one.close()
    with pytest.raises(RuntimeError, match="done → sent is not a legal move"):
        one.send(0, R0, 1, 0.0)
