"""A runner without a model: made-up, deterministic tokens after a modelled time. Measures and tests everything around the model."""

from __future__ import annotations

import time
from collections.abc import Callable

from replica.config import EngineConfig
from replica.contract.messages import EngineLimits, StepTimeCoefficients, TokenLogprobs
from replica.contract.step_time import predict_step_s
from replica.step import Draw, Outcome, Row, Step, StepResult

_VOCAB_SIZE = 49_152
_CONTEXT_TOKENS = 8_192
_KV_BYTES_PER_TOKEN = 23_040  # of a 135M model in bfloat16
_EOS_ID = 2
_MASK = (1 << 64) - 1

INSTANT = StepTimeCoefficients(a=0.0, b=0.0, c=0.0, d=0.0)


class MockRunner:
    """Token of a position = function of (seed, choice, position): the same alone, in a batch, after a preemption, elsewhere.

    It never is an end token or a stop id, unless `stop_after` is given: then the n-th output token of every request that
    has an end token and is not held back by min_tokens is that end token. `sleep` gets the modelled duration in seconds.
    """

    def __init__(
        self,
        limits: EngineLimits,
        step_time: StepTimeCoefficients = INSTANT,
        *,
        eos_token_ids: frozenset[int] = frozenset({_EOS_ID}),
        stop_after: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limits = limits
        self._step_time = step_time
        self._eos = eos_token_ids
        self._stop_after = stop_after
        self._sleep = sleep
        self.steps = 0
        self.tokens = 0

    @classmethod
    def from_config(cls, config: EngineConfig, sleep: Callable[[float], None] = time.sleep) -> MockRunner:
        """A runner of constant step time `config.mock_step_ms` with the limits that the configuration would give a small model."""
        return cls(mock_limits(config), StepTimeCoefficients(a=config.mock_step_ms / 1000, b=0.0, c=0.0, d=0.0), sleep=sleep)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    def execute(self, step: Step) -> StepResult:
        outcomes = tuple(self._outcome(row) for row in step.rows)
        self.steps += 1
        self.tokens += sum(len(row.tokens) for row in step.rows)
        duration_s = modelled_step_s(self._step_time, step)
        if duration_s > 0:
            self._sleep(duration_s)
        return StepResult(step.step_id, outcomes)

    def close(self) -> None:
        """Holds nothing."""

    def _outcome(self, row: Row) -> Outcome:
        scores: tuple[TokenLogprobs | None, ...] = ()
        if row.score_from is not None:
            end = row.start + len(row.tokens) + (row.score_next is not None)
            scores = tuple(self._score(row, position) for position in range(row.score_from, end))
        if row.draw is None:
            return Outcome(scores=scores)
        token = self._token(row.draw)
        wanted = row.draw.sampling.logprobs
        logprobs = None if wanted is None else self._alternatives(token, wanted)
        return Outcome(token=token, logprobs=logprobs, scores=scores)

    def _token(self, draw: Draw) -> int:
        sampling = draw.sampling
        drawn = len(draw.output_ids)
        if self._stop_after is not None and drawn + 1 >= self._stop_after and drawn >= sampling.min_tokens and self._eos:
            return min(self._eos)
        vocab = self._limits.vocab_size
        token = mock_token(sampling.seed, draw.choice, len(draw.prompt_ids) + drawn, vocab)
        for _ in range(vocab):
            if token not in self._eos and token not in sampling.stop_token_ids:
                break
            token = (token + 1) % vocab
        return token

    def _score(self, row: Row, position: int) -> TokenLogprobs | None:
        if position == 0:
            return None
        at = position - row.start
        token = row.tokens[at] if at < len(row.tokens) else row.score_next
        assert token is not None
        return self._alternatives(token, row.score_top)

    def _alternatives(self, token: int, count: int) -> TokenLogprobs:
        vocab = self._limits.vocab_size
        top = tuple(((token + rank) % vocab, -1.0 - rank) for rank in range(min(count, vocab)))
        return TokenLogprobs(token_id=token, logprob=-1.0, top=top)


def mock_token(seed: int, choice: int, position: int, vocab_size: int) -> int:
    """A token id that looks random and depends on its arguments alone (the finaliser of splitmix64)."""
    value = (seed * 0x9E3779B97F4A7C15 + choice * 0xD1B54A32D192ED03 + position * 0x8CB92BA72F3D8DD7) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) % vocab_size


def modelled_step_s(coefficients: StepTimeCoefficients, step: Step) -> float:
    """Duration of `step` by the step-time model, in seconds."""
    prefill = decodes = context = prefill_context = 0
    for row in step.rows:
        length = len(row.tokens)
        end = row.start + length
        context += end
        if length == 1 and row.draw is not None:
            decodes += 1
        else:
            prefill += length
            prefill_context += length * end
    return predict_step_s(coefficients, prefill_tokens=prefill, decodes=decodes, context_tokens=context, prefill_context=prefill_context)


def mock_limits(config: EngineConfig) -> EngineLimits:
    """Limits as the runner of a 135M model would derive them from the configuration. Raises ValueError where it would."""
    blocks = config.num_gpu_blocks_override or config.kv_cache_memory_bytes // (_KV_BYTES_PER_TOKEN * config.block_size)
    pool_tokens = blocks * config.block_size
    context = config.max_model_len or min(_CONTEXT_TOKENS, pool_tokens)
    if context > pool_tokens or context < 2:
        raise ValueError(f"max_model_len {context} does not fit the KV pool of {pool_tokens} tokens")
    return EngineLimits(
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=blocks,
        block_size=config.block_size,
        max_waiting=config.max_waiting,
        vocab_size=_VOCAB_SIZE,
    )
