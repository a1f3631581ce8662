"""What the next step computes. Pure: no clock, no I/O, no tensor; the same calls give the same steps.

Every step: whoever is one token behind gets that token first; then prompts that are partly computed; then waiting
requests, in order, past those that do not fit (within the bound of WaitingQueue). Preemption happens before the first
row is made, so nobody is both scheduled and preempted in a step.
"""

from __future__ import annotations

from collections import deque

from replica.chunk_budget import ChunkBudget
from replica.contract.messages import EngineLimits, StepTimeCoefficients
from replica.growth import Forecast, GrowthEstimate
from replica.kv_manager import KvManager, Match
from replica.plan import Plan, PlanBuilder
from replica.request import Request, State
from replica.scheduling_policy import SchedulingPolicy
from replica.step import Row
from replica.victim import choose_lower, choose_victim
from replica.waiting_queue import WaitingQueue

_SCAN_MAX = 128  # waiting requests looked at in a step
_URGENT_MAX = 8  # waiting requests for which others are preempted in a step


class Scheduler:
    """Owns who runs and who waits. `release` is the one door by which blocks and slots come back."""

    def __init__(self, limits: EngineLimits, policy: SchedulingPolicy, kv: KvManager) -> None:
        self.kv = kv
        self.growth = GrowthEstimate()
        self.running: list[Request] = []  # in order of their start
        self.waiting = WaitingQueue(bypasses_max=policy.bypasses_max, rank=policy.rank)
        self.suspects: deque[Request] = deque()
        self.preemptions = 0
        self._policy = policy
        self._slots = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._budget_tokens = limits.max_num_batched_tokens
        self._steps = 0

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def release(self, request: Request, to: State) -> None:
        """Move a request out of `running` or `waiting`; what it held comes back here and nowhere else."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self.kv.release(request)
        else:
            self.waiting.remove(request)
        request.move(to)

    def preempt(self, request: Request) -> None:
        self.release(request, State.PREEMPTED)
        request.history.preemptions += 1
        request.history.preempted_at_step = self._steps
        self.preemptions += 1
        self.waiting.add(request)

    def distrust(self, failed: Plan) -> None:
        """The step raised: nothing of it counts. Everyone starts anew, who was in it alone, one after another."""
        for request, row in zip(failed.requests, failed.step.rows, strict=True):
            if request.state is State.RUNNING:
                request.history.suspect_until = row.start + len(row.tokens)
                if request not in self.suspects:
                    self.suspects.append(request)
        for request in list(self.running):
            self.release(request, State.PREEMPTED)
            self.waiting.add(request)

    def plan(self, coefficients: StepTimeCoefficients) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        suspect = self._next_suspect()
        if suspect is not None:
            builder = self._plan_alone(suspect, coefficients)
        else:
            if self._policy.by_priority and self.waiting:
                self._make_room_for_urgent()
            builder = self._plan_together(coefficients)
        plan = builder.build(self._steps + 1)
        if plan is not None:
            self._steps += 1
        return plan

    def redo_tokens(self, request: Request) -> int:
        """What preempting `request` would cost: the tokens whose blocks nobody else keeps alive."""
        kept = 0
        pool = self.kv.pool
        for block in request.blocks:
            if pool.references(block) < 2:
                break
            kept += 1
        return max(0, request.computed - kept * self.kv.block_size)

    def check(self, open_requests: list[Request]) -> None:
        """Who runs, who waits and who is open are the same requests; the pool accounts for all of them."""
        for request in self.running:
            assert request.state is State.RUNNING, f"request {request.number} runs, but is {request.state.value}"
        for request in self.waiting:
            assert request.state in (State.WAITING, State.PREEMPTED) and not request.blocks
        here = sorted(request.number for request in (*self.running, *self.waiting))
        assert here == sorted(request.number for request in open_requests), "somebody is in no place, or in two"
        assert len(self.running) <= self._slots
        self.kv.check(self.running)

    # --- a step of everybody ---------------------------------------------------------------------------------------

    def _plan_together(self, coefficients: StepTimeCoefficients) -> PlanBuilder:
        preempted = self.kv.pool.available < len(self.running) and self._make_room_for_growth()
        builder, partial = self._decodes()
        decodes = len(builder)
        seconds = None
        if decodes:
            seconds = self._policy.inter_token_slo_s - builder.shape().predict_s(coefficients)
        budget = ChunkBudget(
            tokens=self._budget_tokens - decodes, seconds=seconds, coefficients=coefficients, block_size=self.kv.block_size
        )
        if partial:
            if self._policy.by_priority:
                partial.sort(key=_urgency)
            if not preempted:
                self._let_short_ones_in(builder, budget, partial)
            for request in partial:
                self._add_chunk(builder, budget, request)
        if self.waiting and not preempted:
            self._start_waiting(builder, budget, budget.tokens)
        return builder

    def _decodes(self) -> tuple[PlanBuilder, list[Request]]:
        """One row for everyone who lacks one token; the others, who lack more, as they stand. The hot loop."""
        requests: list[Request] = []
        rows: list[Row] = []
        partial: list[Request] = []
        context = 0
        size = self.kv.block_size
        grow = self.kv.grow
        for request in self.running:
            tokens = request.tokens
            length = len(tokens)
            start = request.computed
            if length - start != 1 or (request.scoring is not None and request.unscored):
                partial.append(request)
                continue
            if start == len(request.blocks) * size:
                grow(request)
            draw = request.draw if length < request.tokens_max else None
            rows.append(Row(request.number, (tokens[-1],), start, request.blocks, draw))
            requests.append(request)
            context += length
        return PlanBuilder(requests, rows, context), partial

    def _add_chunk(self, builder: PlanBuilder, budget: ChunkBudget, request: Request) -> bool:
        """The next part of `request`, as far as the budget allows; False if there is no room for any."""
        start = request.computed
        overlap = 0
        scoring = request.scoring
        if scoring is not None and start and request.unscored and start == len(scoring.scores):
            overlap = 1  # the score of its first token needs the logits of the token before
        wanted = len(request.tokens) - start + overlap
        if self._policy.chunk_tokens_max is not None:
            wanted = min(wanted, self._policy.chunk_tokens_max + overlap)
        count = budget.fit(start - overlap, wanted)
        if count <= overlap:
            return False
        budget.spend(start - overlap, count)
        builder.add_chunk(request, chunk_row(request, start - overlap, count))
        self.kv.announce(request, start - overlap + count)
        return True

    # --- starting --------------------------------------------------------------------------------------------------

    def _let_short_ones_in(self, builder: PlanBuilder, budget: ChunkBudget, partial: list[Request]) -> None:
        """Half of the budget for waiting requests that it completes: a long prompt does not hold up short ones."""
        half = budget.tokens // 2
        if half < 1 or not self.waiting or len(self.running) >= self._slots:
            return
        for request in partial:  # what they write in this step is no reason to compute it twice
            self.kv.announce(request, min(len(request.tokens), request.computed + budget.tokens))
        self._start_waiting(builder, budget, half, whole=True)

    def _start_waiting(self, builder: PlanBuilder, budget: ChunkBudget, tokens_max: int, *, whole: bool = False) -> None:
        """Start waiting requests, in order, with at most `tokens_max` tokens; with `whole` only those that it completes."""
        forecast: Forecast | None = None
        floor = budget.tokens - tokens_max
        chunk_tokens_max = self._policy.chunk_tokens_max or budget.tokens
        partials = sum(1 for request in self.running if request.remaining > 1) - builder.completed_chunks
        for request in self.waiting.first(_SCAN_MAX):
            if len(self.running) >= self._slots or budget.tokens <= floor:
                return
            if request.history.preempted_at_step == self._steps:
                continue  # it has just yielded
            match = self.kv.match(request)
            if match.pending and request.history.shared_waits < self._policy.shared_waits_max:
                request.history.shared_waits += 1
                continue
            start = self._start_of(request, match)
            lacking = len(request.tokens) - start
            completes = budget.fit(start, lacking) == lacking and lacking <= min(budget.tokens - floor, chunk_tokens_max)
            allowed = completes or (not whole and partials < self._policy.partial_prefills_max)
            if allowed and budget.fit(start, lacking) > 0 and match.needed <= self.kv.pool.available:
                forecast = forecast or self._forecast()
                if not self.running or self._outranks(request) or forecast.fits(request, match.needed):
                    forecast.add(request, match.needed)
                    partials += not completes
                    self._start(builder, request, match)
                    self._add_chunk(builder, budget, request)
                    continue
            if self.waiting.is_aged(request):
                return  # passed often enough: nobody starts before it

    def _start(self, builder: PlanBuilder, request: Request, match: Match) -> None:
        self.waiting.remove(request)
        request.move(State.RUNNING)
        copy = self.kv.start(request, match)
        if copy is not None:
            builder.add_copy(copy)
        self.running.append(request)
        self.waiting.passed_by(request)

    def _start_of(self, request: Request, match: Match) -> int:
        return len(request.tokens) - 1 if match.copy_source is not None else len(match.hits) * self.kv.block_size

    def _forecast(self) -> Forecast:
        pool = self.kv.pool
        return Forecast(
            capacity=pool.count, in_use=pool.referenced, block_size=self.kv.block_size, running=self.running, growth=self.growth
        )

    def _outranks(self, request: Request) -> bool:
        """Someone runs who would yield to `request`: over-commit is theirs to pay."""
        return self._policy.by_priority and any(other.priority > request.priority for other in self.running)

    # --- preemption ------------------------------------------------------------------------------------------------

    def _make_room_for_growth(self) -> bool:
        """Preempt until everyone who needs a page for its next token can have one. True if anybody had to yield."""
        before = self.preemptions
        size = self.kv.block_size
        growing = sum(1 for request in self.running if request.remaining == 1 and request.computed == len(request.blocks) * size)
        while growing > self.kv.pool.available:
            victim = choose_victim(self.running, self.redo_tokens)
            assert victim is not None, "a request alone in the pool does not fit: it should never have been accepted"
            growing -= victim.remaining == 1 and victim.computed == len(victim.blocks) * size
            self.preempt(victim)
        return self.preemptions > before

    def _make_room_for_urgent(self) -> None:
        """Preempt strictly less urgent requests for waiting ones that lack a slot or pages, if that helps."""
        slots = self._slots - len(self.running)
        blocks = self.kv.pool.available
        for request in self.waiting.first(_URGENT_MAX):
            needed = self.kv.match(request).needed
            if self._could_yield(request) + blocks < needed:
                continue
            while slots < 1 or blocks < needed:
                victim = choose_lower(self.running, request.priority, self.redo_tokens)
                if victim is None:
                    return
                before = self.kv.pool.available
                self.preempt(victim)
                slots += 1
                blocks += self.kv.pool.available - before
            slots -= 1
            blocks -= needed

    def _could_yield(self, request: Request) -> int:
        """Blocks that preempting everyone less urgent would bring at most."""
        return sum(other.history.own_blocks for other in self.running if other.priority > request.priority)

    # --- after a failed step ---------------------------------------------------------------------------------------

    def _next_suspect(self) -> Request | None:
        while self.suspects:
            request = self.suspects[0]
            if request.state is not State.FINISHED and request.computed < request.history.suspect_until:
                return request
            self.suspects.popleft()
        return None

    def _plan_alone(self, request: Request, coefficients: StepTimeCoefficients) -> PlanBuilder:
        """A step of `request` only."""
        budget = ChunkBudget(tokens=self._budget_tokens, seconds=None, coefficients=coefficients, block_size=self.kv.block_size)
        builder = PlanBuilder([], [], 0)
        if request.state is not State.RUNNING:
            while len(self.running) >= self._slots or self.kv.match(request).needed > self.kv.pool.available:
                self.preempt(self.running[-1])
            self._start(builder, request, self.kv.match(request))
        self._add_chunk(builder, budget, request)
        return builder


def chunk_row(request: Request, start: int, count: int) -> Row:
    """Row for positions start … start+count-1; draws if it reaches the end and a token may follow; scores what is not scored."""
    end = start + count
    reaches_end = end == len(request.tokens) and end < request.tokens_max
    score_from = None
    score_top = 0
    if request.scoring is not None and len(request.scoring.scores) < min(end, request.terms.prompt_length):
        score_from = len(request.scoring.scores)
        score_top = request.scoring.top
    return Row(
        request=request.number,
        tokens=request.tokens[start:end],
        start=start,
        blocks=request.blocks,
        draw=request.draw if reaches_end else None,
        score_from=score_from,
        score_top=score_top,
    )


def _urgency(request: Request) -> tuple[int, int]:
    return (request.priority, request.number)
