"""A replica by its costs: continuous batching with chunked prefill, slots, and a prefix cache of so many blocks; running KV is free.

A step costs O(chunks + ends), not O(running): decodes are counted, their ends kept in a heap by step number. Where nobody
looks at single tokens (`streams` False) a request's tokens after the first are told with its last one.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from random import Random

from bench.simulator.block_cache import BlockCache
from bench.simulator.cost import Profile
from bench.simulator.simulated_replica import Turn
from replica.contract.messages import (
    Bounce,
    BounceReason,
    EngineLimits,
    FinishReason,
    GenerateRequest,
    LoadReport,
    StepTimeCoefficients,
    TokenDelta,
)
from replica.contract.step_time import predict_step_s
from replica.mock_runner import mock_token


@dataclass(slots=True)
class _Sequence:
    owner: int
    request: GenerateRequest
    prompt: int  # emitted tokens of earlier attempts included
    arrived_s: float
    left: int  # tokens still to generate
    estimate: int  # what the report counts for it while it waits
    computed: int = 0
    published: int = 0  # blocks
    cached: int = 0
    waited_s: float | None = None
    decodes_from: int | None = None  # number of the step that brought its first token
    is_over: bool = False

    def start(self, now: float, hit: int, block_size: int) -> None:
        """It is in a step for the first time, and finds so many blocks."""
        self.published = hit
        self.cached = self.computed = min(hit * block_size, self.prompt - 1)
        self.waited_s = now - self.arrived_s

    def filled(self, block_size: int) -> tuple[bytes, ...]:
        """Keys of the blocks that have become full since it was asked last."""
        full = min(self.computed // block_size, len(self.request.block_keys))
        begin, self.published = self.published, max(self.published, full)
        return self.request.block_keys[begin:full]


def _chunk(one: _Sequence, room: int, chunks: list[tuple[_Sequence, int]]) -> int:
    size = min(room, one.prompt - one.computed)
    chunks.append((one, size))
    return size


class CostReplica:
    def __init__(
        self,
        profile: Profile,
        *,
        seed: int = 0,
        told: StepTimeCoefficients | None = None,
        noise: float = 0.0,
        streams: bool = False,
    ) -> None:
        """`told`: what it reports instead of the truth; `noise`: standard deviation of a step's duration, relative."""
        self.profile = profile
        self.slowness = 1.0
        self._limits = profile.limits()
        self._told = told or profile.step_time
        self._noise = noise
        self._random = Random(seed)
        self._streams = streams
        self._attempts: dict[tuple[int, int], _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: list[_Sequence] = []
        self._decoding: dict[tuple[int, int], _Sequence] = {}
        self._ends: list[tuple[int, int, _Sequence]] = []  # (step, order, who)
        self._order = 0
        self._chunks: list[tuple[_Sequence, int]] | None = None  # of the step that runs
        self._cache = BlockCache(profile.cache_blocks)
        self._progress = 0
        self._decode_context = 0
        self._queued = 0
        self._accepted: list[tuple[int, int]] = []
        self._bounces: list[tuple[int, Bounce]] = []
        self._deltas: list[tuple[int, TokenDelta]] = []

    # --- facts -------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def is_stepping(self) -> bool:
        return self._chunks is not None

    @property
    def holds(self) -> int:
        return len(self._attempts)

    # --- from routers ------------------------------------------------------------------------------------------------

    def submit(self, owner: int, request: GenerateRequest, now: float) -> None:
        prompt = len(request.prompt_ids) + len(request.emitted_ids)
        left = request.sampling.max_tokens - len(request.emitted_ids)
        if prompt + 1 > self._limits.max_model_len:
            self._bounces.append((owner, Bounce(request.attempt, BounceReason.NEVER_FITS, "too long")))
            return
        if len(self._waiting) >= self._limits.max_waiting:
            self._bounces.append((owner, Bounce(request.attempt, BounceReason.QUEUE_FULL)))
            return
        one = _Sequence(owner, request, prompt, now, left, max(1, prompt - self._cache.hit(request.block_keys) * self.profile.block_size))
        self._queued += one.estimate
        self._attempts[owner, request.attempt] = one
        self._waiting.append(one)
        self._accepted.append((owner, request.attempt))

    def cancel(self, owner: int, attempt: int) -> None:
        one = self._attempts.pop((owner, attempt), None)
        if one is None:
            return
        one.is_over = True
        if one.waited_s is None:
            self._waiting.remove(one)
            self._queued -= one.estimate
        elif one.decodes_from is None:
            self._prefilling.remove(one)
            self._queued -= one.prompt - one.computed
        else:
            del self._decoding[owner, attempt]
            self._decode_context -= one.prompt + self._progress - one.decodes_from

    def cancel_owner(self, owner: int) -> None:
        for key in [key for key in self._attempts if key[0] == owner]:
            self.cancel(*key)

    # --- its life ----------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        if self._chunks is not None or not self._attempts:
            return None
        decodes = len(self._decoding)
        room = _room(self._limits, self.profile.step_time, decodes, self._decode_context)
        chunks: list[tuple[_Sequence, int]] = []
        for one in self._prefilling:
            if room <= 0:
                break
            room -= _chunk(one, room, chunks)
        while self._waiting and room > 0 and decodes + len(self._prefilling) < self._limits.max_num_seqs:
            one = self._waiting.popleft()
            hit = self._cache.hit(one.request.block_keys)
            self._cache.touch(one.request.block_keys[:hit])
            one.start(now, hit, self.profile.block_size)
            self._queued += one.prompt - one.computed - one.estimate
            self._prefilling.append(one)
            room -= _chunk(one, room, chunks)
        self._chunks = chunks
        context = self._decode_context + decodes + sum(one.computed + size for one, size in chunks)
        tokens = sum(size for _, size in chunks)
        took_s = predict_step_s(self.profile.step_time, prefill_tokens=tokens, decodes=decodes, context_tokens=context)
        if self._noise:
            took_s *= max(0.1, self._random.gauss(1.0, self._noise))
        return took_s * self.slowness

    def end(self, now: float) -> Turn:
        assert self._chunks is not None
        chunks, self._chunks = self._chunks, None
        self._progress += 1
        deltas = self._deltas
        self._decode_context += len(self._decoding)
        if self._streams:
            deltas.extend((one.owner, self._token(one)) for one in self._decoding.values())
        while self._ends and self._ends[0][0] <= self._progress:
            one = heapq.heappop(self._ends)[2]
            if not one.is_over:
                self._leave(one, deltas)
        for one, size in chunks:
            if one.is_over:
                continue
            self._queued -= size
            one.computed += size
            self._cache.store(one.filled(self.profile.block_size))
            if one.computed >= one.prompt:
                self._first(one, deltas)
        return self.beat(now)

    def beat(self, now: float) -> Turn:
        turn = Turn(self.load(), tuple(self._deltas), tuple(self._accepted), tuple(self._bounces), self._cache.take_events())
        self._deltas, self._accepted, self._bounces = [], [], []
        return turn

    def load(self) -> LoadReport:
        decodes = len(self._decoding)
        running = decodes + len(self._prefilling)
        context = self._decode_context + sum(one.computed for one in self._prefilling)
        base_s = predict_step_s(self._told, prefill_tokens=0, decodes=decodes, context_tokens=context)
        return LoadReport(
            progress=self._progress,
            running=running,
            waiting=len(self._waiting),
            queued_prefill_tokens=self._queued,
            context_tokens=context,
            free_blocks=max(0, self._limits.num_blocks - context // self.profile.block_size - running),
            evictable_blocks=0,
            step_time=self._told,
            predicted_step_s=base_s + self._told.b * min(_room(self._limits, self._told, decodes, self._decode_context), self._queued),
        )

    def snapshot(self) -> tuple[tuple[bytes, bytes], ...]:
        return self._cache.snapshot()

    def check(self) -> None:
        """What is counted as one goes is what one would count now."""
        assert len(self._attempts) == len(self._waiting) + len(self._prefilling) + len(self._decoding)
        queued = sum(one.estimate for one in self._waiting) + sum(one.prompt - one.computed for one in self._prefilling)
        assert self._queued == queued, f"{self._queued} tokens queued, counted {queued}"
        context = sum(one.prompt + self._progress - (one.decodes_from or 0) for one in self._decoding.values())
        assert self._decode_context == context, f"{self._decode_context} context tokens, counted {context}"
        assert len(self._cache) <= self.profile.cache_blocks

    # --- within ------------------------------------------------------------------------------------------------------

    def _first(self, one: _Sequence, deltas: list[tuple[int, TokenDelta]]) -> None:
        self._prefilling.remove(one)
        self._cache.touch(one.request.block_keys)
        one.decodes_from = self._progress
        self._decoding[one.owner, one.request.attempt] = one
        self._decode_context += one.prompt
        if one.left <= 1:
            self._leave(one, deltas, cached=one.cached)
            return
        self._order += 1
        heapq.heappush(self._ends, (self._progress + one.left - 1, self._order, one))
        deltas.append((one.owner, self._token(one, cached=one.cached)))

    def _leave(self, one: _Sequence, deltas: list[tuple[int, TokenDelta]], *, cached: int | None = None) -> None:
        """Its last token."""
        one.is_over = True
        key = (one.owner, one.request.attempt)
        del self._attempts[key], self._decoding[key]
        assert one.decodes_from is not None
        self._decode_context -= one.prompt + self._progress - one.decodes_from
        if self._streams and cached is None:
            place = max(i for i, (owner, delta) in enumerate(deltas) if (owner, delta.attempt) == key)
            deltas[place] = (one.owner, self._token(one, finish=FinishReason.LENGTH))
        else:
            deltas.append((one.owner, self._token(one, cached=cached, finish=FinishReason.LENGTH)))

    def _token(self, one: _Sequence, *, cached: int | None = None, finish: FinishReason | None = None) -> TokenDelta:
        """The token of this step; where nobody looks at single ones, with the last all since the first."""
        assert one.decodes_from is not None
        ids: tuple[int, ...]
        if self._streams:
            position = one.prompt + self._progress - one.decodes_from
            ids = (mock_token(one.request.sampling.seed, one.request.choice, position, self._limits.vocab_size),)
        else:
            ids = (0,) * (max(1, one.left - 1) if finish and cached is None else min(1, one.left))
        waited_s = one.waited_s if cached is not None else None
        return TokenDelta(one.request.attempt, ids, cached_tokens=cached, waited_s=waited_s, finish=finish)


def _room(limits: EngineLimits, k: StepTimeCoefficients, decodes: int, context: int) -> int:
    """Prefill tokens that a step may take beside its decodes."""
    room = limits.max_num_batched_tokens - decodes
    if limits.step_slo_s is not None and decodes and k.b > 0:
        base_s = k.a + k.c * decodes + k.d * context
        room = min(room, max(16, int((limits.step_slo_s - base_s) / k.b)))
    return max(1, room)
