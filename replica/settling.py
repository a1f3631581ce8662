"""Taking in what a step brought, row by row."""

from __future__ import annotations

from replica.contract.messages import FinishReason
from replica.departures import Departures, ending_of
from replica.kv_manager import KvManager
from replica.plan import Plan
from replica.request import Request, State
from replica.roster import Roster
from replica.step import Outcome, Row, StepResult


def failure_of(plan: Plan, result: StepResult | Exception) -> str:
    """Why nothing of the step counts; empty if it does. A result that does not answer the step is a failure too."""
    if isinstance(result, Exception):
        return f"{type(result).__name__}: {result}"
    if type(result) is not StepResult or type(result.outcomes) is not tuple:
        return "the runner answered with something that is no result of a step"
    if result.step_id != plan.step.step_id or len(result.outcomes) != len(plan.requests):
        return f"the runner answered step {result.step_id} with {len(result.outcomes)} outcomes"
    for outcome in result.outcomes:  # before the first row counts: a failure among them would leave the step half taken in
        if type(outcome) is not Outcome or (outcome.token is not None and type(outcome.token) is not int):
            return "the runner answered a row with something that is no outcome, or a token that is no integer"
    return ""


def settle(plan: Plan, result: StepResult, kv: KvManager, departures: Departures, *, vocab_size: int, expected: bool = False) -> None:
    """Every row: computed tokens count, full blocks become findable, the drawn token goes out. The other hot loop.

    `expected`: the tokens have their places already (replica.expectation). Rows of requests that were cancelled meanwhile
    count for nothing: their blocks are gone, and were never findable.
    """
    size = kv.block_size
    running = State.RUNNING
    tell = departures.outbox.tokens
    for request, row, outcome in zip(plan.requests, plan.step.rows, result.outcomes, strict=True):
        if request.state is not running:
            continue
        if outcome.error:
            departures.end(request, FinishReason.ERROR, error=outcome.error)
            continue
        end = row.start + len(row.tokens)
        request.computed = end
        if end // size > request.keyed:
            kv.publish(request)
        if row.score_from is not None and not _take_scores(request, row, outcome):
            departures.end(request, FinishReason.ERROR, error="the runner's prompt scores do not match the prompt")
            continue
        if row.draw is None:
            if end >= request.tokens_max:
                departures.end(request, FinishReason.LENGTH)  # nothing was to be drawn: max_tokens is 0
            continue
        token = outcome.token
        if token is None or not 0 <= token < vocab_size:
            departures.end(request, FinishReason.ERROR, error=f"the runner drew {token}, which is no token")
            continue
        if expected:
            request.tokens[-1] = token
        else:
            request.tokens.append(token)
        request.output_ids.append(token)
        reason = ending_of(request, token)
        if reason is None:
            tell(request, (token,), logprobs=outcome.logprobs)
        else:
            departures.end(request, reason, (token,), outcome.logprobs)


def take_apart(plan: Plan, error: str, roster: Roster, departures: Departures) -> None:
    """The step failed: who was alone in it ends; of several, each is run alone to see whose fault it is."""
    if len(plan.requests) > 1:
        roster.distrust(plan)
    elif plan.requests[0].state is not State.FINISHED:  # else it was cancelled while it failed
        departures.end(plan.requests[0], FinishReason.ERROR, error=error)


def _take_scores(request: Request, row: Row, outcome: Outcome) -> bool:
    """Append the scores of positions score_from … end of the row, and of the token after; False if there are not as many."""
    assert request.scoring is not None and row.score_from is not None
    scores = request.scoring.scores
    end = row.start + len(row.tokens) + (row.score_next is not None)
    if row.score_from != len(scores) or type(outcome.scores) is not tuple or len(outcome.scores) != end - row.score_from:
        return False
    scores.extend(outcome.scores)
    return True
