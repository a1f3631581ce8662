"""What the next step computes. Pure: no clock, no I/O, no tensor; the same calls give the same steps.

Every step: whoever is one token behind gets that token first; then prompts that are partly computed; then waiting
requests. What decides each of these is in making_room, chunk_budget and starting; how the baselines do it in plain_batching.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from replica.chunk_budget import ChunkBudget
from replica.chunks import add_chunk
from replica.contract.messages import StepTimeCoefficients
from replica.making_room import make_room_for_growth, make_room_for_urgent
from replica.plain_batching import PlainBatching
from replica.plan import Plan, PlanBuilder, Shape
from replica.rehearsal import Rehearsal
from replica.request import Request, State
from replica.roster import Roster
from replica.scheduling_policy import SchedulingPolicy
from replica.starting import Starting
from replica.step import Row
from replica.victim import choose_latest, choose_victim


@dataclass(frozen=True, slots=True)
class Draft:
    """A step in the making, and what may still be added to it."""

    builder: PlanBuilder
    starting: Starting
    changes: int  # of the roster, that it knows of


class Scheduler:
    """Plans steps over `roster` within `budget_tokens` a step."""

    def __init__(self, roster: Roster, policy: SchedulingPolicy, budget_tokens: int) -> None:
        self._roster = roster
        self._policy = policy
        self._budget_tokens = budget_tokens
        self._plain = None if policy.batching == "adaptive" else PlainBatching(roster, policy)
        self._ahead: Draft | None = None  # the step after the one that runs

    def plan(self, coefficients: StepTimeCoefficients) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        builder = self._caught_up()
        if builder is None:
            self._begin()
            suspect = self._roster.next_suspect()
            if suspect is not None:
                builder = self._alone(suspect, coefficients)
            elif self._plain is not None:
                builder = self._plainly(self._plain, coefficients)
            else:
                builder = self._together(coefficients).builder
        plan = builder.build(self._roster.step_id)
        if plan is None:
            self._roster.kv.drop_step()
        return plan

    def _together(self, coefficients: StepTimeCoefficients) -> Draft:
        """Who has to yield does so first; then decodes, then who is partly computed, then who waits."""
        roster, policy = self._roster, self._policy
        if policy.by_priority and roster.waiting:
            budget_beside = partial(self._budget, coefficients, slo_s=policy.inter_token_slo_s)
            make_room_for_urgent(roster, Rehearsal(policy, budget_beside, roster.kv))
        short_of_pages = make_room_for_growth(roster, choose_victim)
        builder, unfinished = self._decodes()
        budget = self._budget(coefficients, builder.shape(), policy.inter_token_slo_s)
        starting = Starting(roster, policy, builder, budget)
        unfinished = self._overdue_first(unfinished, builder, budget)
        if unfinished and not short_of_pages:
            starting.start_before(unfinished)
        self._go_on(unfinished, builder, budget, None if short_of_pages else starting)
        if not short_of_pages:
            starting.start_in_order()
        return Draft(builder, starting, roster.changes)

    def _decodes(self) -> tuple[PlanBuilder, list[Request]]:
        """A row for everyone who lacks one token; who lacks more is returned. The hot loop: a few µs per request."""
        requests: list[Request] = []
        rows: list[Row] = []
        unfinished: list[Request] = []
        context = 0
        size = self._roster.kv.block_size
        for request in self._roster.running:
            tokens = request.tokens
            length = len(tokens)
            start = request.computed
            if length - start != 1 or (request.scoring is not None and request.unscored):
                unfinished.append(request)
                continue
            if start == len(request.blocks) * size:
                self._roster.kv.grow(request)
            draw = request.draw if length < request.tokens_max else None
            rows.append(Row(request.number, (tokens[-1],), start, request.blocks, draw))
            requests.append(request)
            context += length
        return PlanBuilder(requests, rows, context), unfinished

    def _overdue_first(self, unfinished: list[Request], builder: PlanBuilder, budget: ChunkBudget) -> list[Request]:
        """A chunk before everybody else for whoever has stood still too long, the longest first; the others are returned.

        Strict priority lets urgent prompts pass a partly computed one, but that one holds pages: so it moves in one step of
        `bypasses_max` + 1 at least, takes what that step has left beside the decodes, and gives the pages back in the end.
        To make it yield them instead would compute it twice, and who has yielded PREEMPTIONS_MAX times yields no more.
        """
        overdue = [request for request in unfinished if self._policy.is_overdue(request)] if self._policy.by_priority else []
        overdue.sort(key=lambda request: (-request.history.left_out, request.number))
        moved = {
            request.number  # membership only
            for request in overdue
            if add_chunk(builder, budget, self._roster.kv, request, self._policy.chunk_tokens_max)
        }
        return [request for request in unfinished if request.number not in moved]

    def _go_on(self, unfinished: list[Request], builder: PlanBuilder, budget: ChunkBudget, starting: Starting | None = None) -> None:
        """A chunk for everyone who is partly computed, as far as the budget goes: by urgency, then by start. Between two
        of them `starting`, if given, starts who is more urgent than the second."""
        if self._policy.by_priority:
            unfinished.sort(key=_urgency)
        for before, request in zip([None, *unfinished], unfinished, strict=False):
            if starting is not None and before is not None and request.priority > before.priority:
                starting.start_in_order(below=request.priority)
            if not add_chunk(builder, budget, self._roster.kv, request, self._policy.chunk_tokens_max):
                request.history.left_out += 1

    def _budget(self, coefficients: StepTimeCoefficients, decoding: Shape, slo_s: float | None = None) -> ChunkBudget:
        """What is left of the step's tokens, and of `slo_s` by the step-time model where somebody decodes who would have to wait."""
        seconds = None
        if slo_s is not None and decoding.decodes:
            seconds = slo_s - decoding.predict_s(coefficients)
        return ChunkBudget(
            tokens=self._budget_tokens - decoding.decodes,
            seconds=seconds,
            coefficients=coefficients,
            block_size=self._roster.kv.block_size,
            whole=self._policy.whole_prompts,
        )

    # --- one step ahead: while a step runs the next one is planned, as if every row brought a token and nobody left --------

    def plan_ahead(self, coefficients: StepTimeCoefficients) -> None:
        """Plan the step after the one that runs; call only if `can_plan_ahead`. `plan` gives it out once it has caught up."""
        self._begin()
        self._ahead = self._together(coefficients)

    def can_plan_ahead(self) -> bool:
        """Nobody has to yield, which is decided by what is known then, and the step after has no order of its own."""
        roster = self._roster
        urgent = self._policy.by_priority and len(roster.waiting) > 0
        return self._plain is None and not urgent and roster.next_suspect() is None and roster.kv.pool.available >= len(roster.running)

    def _caught_up(self) -> PlanBuilder | None:
        """The step planned ahead without those who have left since, with those who can start now; None if there is no such step.

        After a step that failed everybody in it has left, and the same holds.
        """
        draft, self._ahead = self._ahead, None
        if draft is None:
            return None
        draft.builder.catch_up()
        if not len(draft.builder):  # nobody is left: what made it small does not bind the next one
            self._roster.kv.drop_step()
            return None
        draft.starting.start_again(draft.changes)
        return draft.builder

    def _begin(self) -> None:
        self._roster.step_id += 1
        self._roster.kv.begin_step()

    # --- steps of another kind ---------------------------------------------------------------------------------------------

    def _plainly(self, batching: PlainBatching, coefficients: StepTimeCoefficients) -> PlanBuilder:
        """The same three parts as the baselines do them: no step-time model, no skip-ahead, no forecast."""
        roster = self._roster
        short_of_pages = make_room_for_growth(roster, choose_latest)
        builder, unfinished = self._decodes()
        budget = self._budget(coefficients, builder.shape())
        self._go_on(unfinished, builder, budget)
        if not short_of_pages:
            batching.start_in_order(builder, budget)
        return builder

    def _alone(self, request: Request, coefficients: StepTimeCoefficients) -> PlanBuilder:
        """A step of a suspect only; others that hold what it needs yield."""
        roster = self._roster
        builder = PlanBuilder([], [], 0)
        if request.state is not State.RUNNING:
            while not roster.free_slots or roster.kv.match(request).needed > roster.kv.pool.available:
                roster.preempt(roster.running[-1])
            copy = roster.start(request, roster.kv.match(request))
            if copy is not None:
                builder.add_copy(copy)
        add_chunk(builder, self._budget(coefficients, builder.shape()), roster.kv, request, self._policy.chunk_tokens_max)
        return builder


def _urgency(request: Request) -> tuple[int, int]:
    return (request.priority, request.number)
