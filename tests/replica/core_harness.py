"""A runner whose tokens depend on what the pages really hold, and short ways to drive an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replica.config import EngineConfig
from replica.contract.messages import (
    EngineLimits,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StepTimeCoefficients,
    TokenDelta,
    TokenLogprobs,
)
from replica.engine import Engine, EngineOutput
from replica.mock_runner import modelled_step_s
from replica.step import Outcome, Row, Step, StepResult
from tests.replica.step_wire import StepWire

VOCAB = 1000
EOS = 2
COST = StepTimeCoefficients(a=8e-3, b=5e-5, c=2e-5, d=4e-8)


def limits(
    blocks: int = 256, *, block: int = 16, seqs: int = 16, budget: int = 256, context: int = 4096, waiting: int = 4096
) -> EngineLimits:
    return EngineLimits(
        max_model_len=context,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        num_blocks=blocks,
        block_size=block,
        max_waiting=waiting,
        vocab_size=VOCAB,
    )


class PagedRunner:
    """Writes each token into its page and reads the whole context back through the row's pages, as attention would.

    A token drawn is a function of (what was read, seed, choice, position): a page that was lost, reused too early, never
    written or copied wrongly changes the text. `raise_for(step)` and `error_for(row)` inject failures.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.budget = limits.max_num_batched_tokens  # that no step may exceed
        self.pages: dict[int, dict[int, int]] = {}
        self.steps: list[Step] = []
        self._wire = StepWire(limits.block_size)
        self.on_step: Callable[[Step], None] = lambda step: None
        self.raise_for: Callable[[Step], str] = lambda step: ""
        self.error_for: Callable[[Row], str] = lambda row: ""
        self.stop_at: dict[int, int] = {}  # seed → output index at which an end token is drawn

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.on_step(step)
        self._wire.assert_carries(step)
        assert sum(len(row.tokens) for row in step.rows) <= self.budget, "token budget exceeded"
        assert len(step.rows) <= self._limits.max_num_seqs, "more rows than slots"
        assert len({row.request for row in step.rows}) == len(step.rows), "a request twice in a step"
        size = self._limits.block_size
        for copy in step.copies:
            self.pages[copy.target] = dict(self.pages.get(copy.source, {}))
        written: dict[tuple[int, int], int] = {}
        for row in step.rows:
            for position, token in enumerate(row.tokens, row.start):
                self.pages.setdefault(row.blocks[position // size], {})[position % size] = token
                place = (row.blocks[position // size], position % size)
                assert written.setdefault(place, token) == token, "two rows write different tokens to one place"
        failure = self.raise_for(step)
        if failure:
            raise RuntimeError(failure)
        return StepResult(step.step_id, tuple(self._outcome(row) for row in step.rows))

    def close(self) -> None:
        pass

    def _outcome(self, row: Row) -> Outcome:
        error = self.error_for(row)
        if error:
            return Outcome(error=error)
        end = row.start + len(row.tokens)
        size = self._limits.block_size
        seen = [self.pages[row.blocks[p // size]].get(p % size, -1) for p in range(end)]
        scores: tuple[TokenLogprobs | None, ...] = ()
        if row.score_from is not None:
            assert row.score_from == 0 or row.score_from > row.start, "the logits before are not in this row"
            judged = seen if row.score_next is None else [*seen, row.score_next]
            assert row.score_next is None or row.draw is None, "what is drawn is not in the prompt"
            scores = tuple(self._score(judged, p, row.score_top) for p in range(row.score_from, len(judged)))
        if row.draw is None:
            return Outcome(scores=scores)
        draw = row.draw
        expected = [*draw.prompt_ids, *draw.output_ids]
        assert len(expected) == end, "a draw needs all tokens computed"
        assert seen == expected, "the pages do not hold this request's tokens"
        drawn = len(draw.output_ids)
        if self.stop_at.get(draw.sampling.seed) == drawn:
            return Outcome(token=EOS, scores=scores)
        return Outcome(token=3 + hash((tuple(seen), draw.sampling.seed, draw.choice, drawn)) % (VOCAB - 3), scores=scores)

    def _score(self, seen: Sequence[int], position: int, top: int) -> TokenLogprobs | None:
        if position == 0:
            return None
        return TokenLogprobs(seen[position], -float(1 + hash(tuple(seen[:position])) % 97), tuple((t, -1.0) for t in range(top)))


@dataclass
class Heard:
    """Everything a client was told about one attempt."""

    token_ids: list[int] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def finish(self) -> FinishReason | None:
        return self.deltas[-1].finish if self.deltas else None

    @property
    def cached_tokens(self) -> int | None:
        return self.deltas[0].cached_tokens


class Driver:
    """An engine on a modelled clock, with everything heard; every invariant is checked after each step."""

    def __init__(self, runner: PagedRunner, *, check: bool = True, **config: object) -> None:
        self.runner = runner
        self.now_s = 0.0
        self.engine = Engine(runner, EngineConfig.model_validate(config), "m", "r", lambda: self.now_s)
        self.heard: dict[tuple[int, int], Heard] = {}
        self.outputs: list[EngineOutput] = []
        self._check = check
        self.failures_expected = False
        self._attempts = 0
        runner.on_step = self._tick

    def _tick(self, step: Step) -> None:
        self.now_s += modelled_step_s(COST, step)

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        owner: int = 0,
        priority: int = 0,
        emitted: Sequence[int] = (),
        deadline_s: float | None = None,
        **sampling: object,
    ) -> int:
        """Submit; the attempt's number. Fails the test if it is bounced. Unless given, the seed is the attempt's number."""
        self._attempts += 1
        fields = {name: sampling.pop(name) for name in ("block_keys", "cache_salt", "adapter", "choice") if name in sampling}
        params = {"seed": self._attempts, "ignore_eos": True, **sampling}
        message = GenerateRequest(
            attempt=self._attempts,
            request_id=str(self._attempts),
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
            emitted_ids=tuple(emitted),
            priority=priority,
            deadline_s=deadline_s,
            **{"choice": 0, "block_keys": (), **fields},  # type: ignore[arg-type]
        )
        bounce = self.engine.submit(owner, message)
        assert bounce is None, bounce
        return self._attempts

    def step(self) -> EngineOutput | None:
        output = self.engine.step()
        self.take(output)
        return output

    def take(self, output: EngineOutput | None) -> None:
        if output is not None:
            self.outputs.append(output)
            assert self.failures_expected or not output.error, output.error
            assert not output.error.startswith("AssertionError"), output.error  # the runner found a page wrong: no fault to order
            for owner, delta in output.deltas:
                heard = self.heard.setdefault((owner, delta.attempt), Heard())
                assert heard.finish is None, "told something after the end"
                heard.deltas.append(delta)
                heard.token_ids.extend(delta.token_ids)
        if self._check:
            self.engine.check()

    def run(self, steps_max: int = 20_000) -> int:
        """Until nothing is left to do; the number of steps."""
        for count in range(steps_max):
            if not self.engine.has_work:
                return count
            assert self.step() is not None, "work is left, but nothing runs"
        raise AssertionError(f"not done after {steps_max} steps")

    def text(self, attempt: int, owner: int = 0) -> list[int]:
        return self.heard[(owner, attempt)].token_ids

    def cached(self, attempt: int) -> int:
        """Prompt tokens found in the cache."""
        cached = self.heard[(0, attempt)].cached_tokens
        assert cached is not None
        return cached

    def finish(self, attempt: int, owner: int = 0) -> FinishReason | None:
        return self.heard[(owner, attempt)].finish

    def tokens_computed(self) -> int:
        return sum(output.tokens for output in self.outputs)


def ids(seed: int, count: int) -> list[int]:
    """`count` token ids that depend on `seed` alone."""
    return [3 + (seed * 7919 + position * 104_729 + position * position * 31) % (VOCAB - 3) for position in range(count)]
