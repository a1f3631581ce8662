"""A scriptable backend: what a dispatcher and its replicas would answer, decided by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from replica.contract.messages import EngineLimits, FinishReason, GenerateRequest, TokenLogprobs
from router.policy.classes import Terms
from router.ports import Account, Batch, Delta, PoolFacts, PoolStatus, Rejected

LIMITS = EngineLimits(
    max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=512, num_blocks=1024, block_size=16, max_waiting=1024, vocab_size=49152
)
STATUS = PoolStatus(ready=True, live=True, replicas=2, limits=LIMITS, model="smollm2", revision="r1", block_size=16)
EOS = 2


@dataclass(slots=True)
class Script:
    """How one choice goes: `tokens`, `per_delta` at a time, then `finish` – or an exception after `raise_after` tokens."""

    tokens: tuple[int, ...] = (28120, EOS)
    per_delta: int = 1
    finish: FinishReason = FinishReason.STOP
    stop_id: int | None = EOS
    error: str = ""
    raise_after: int | None = None
    cached_tokens: int = 0
    queue_time_s: float | None = 0.01
    delay_s: float = 0.0  # before each Delta
    finish_alone: bool = False  # the finish comes in a Delta of its own
    together: int = 1  # so many Deltas come at once


def repeat(token: int, count: int) -> Script:
    return Script(tokens=(token,) * count, finish=FinishReason.LENGTH, stop_id=None)


def token_logprobs(token: int, top: int) -> TokenLogprobs:
    """Made up, but a function of the token alone. The last alternative is impossible."""
    others = tuple((token + i, -1.0 - i if i < top - 1 else float("-inf")) for i in range(top))
    return TokenLogprobs(token, -(token % 7) / 8, others)


@dataclass(slots=True)
class FakeBackend:
    """`script(request)` says how a choice goes. Keeps what it was given and what happened to it."""

    script: Callable[[GenerateRequest], Script] = lambda request: Script()
    pool: PoolStatus = STATUS
    reject: Exception | None = None
    foreseen: Rejected | None = None
    hold: asyncio.Event | None = None  # open() waits for it
    batches: list[Batch] = field(default_factory=list)
    sessions: list[FakeSession] = field(default_factory=list)
    told: Account = field(default_factory=Account)
    opening: int = 0  # open() calls that wait
    cancelled_opens: int = 0

    async def open(self, batch: Batch) -> FakeSession:
        self.batches.append(batch)
        if self.hold is not None:
            self.opening += 1
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled_opens += 1
                raise
            finally:
                self.opening -= 1
        if self.reject is not None:
            raise self.reject
        session = FakeSession([(request, self.script(request)) for request in batch.requests])
        self.sessions.append(session)
        return session

    def foresee(self, arrival_s: float, terms: Terms, about_tokens: int) -> Rejected | None:
        return self.foreseen

    def facts(self) -> PoolFacts:
        return PoolFacts(self.pool.limits, self.pool.model, self.pool.revision, self.pool.block_size)

    def status(self) -> PoolStatus:
        running = sum(session.running for session in self.sessions)
        return replace(self.pool, running=running, kv_usage=running / 100)

    def account(self) -> Account:
        return self.told

    @property
    def running(self) -> int:
        return sum(session.running for session in self.sessions)


class FakeSession:
    """Round robin over the choices that still run."""

    def __init__(self, choices: Iterable[tuple[GenerateRequest, Script]]) -> None:
        self._plans = {index: (script, deltas_of(index, request, script)) for index, (request, script) in enumerate(choices)}
        self._turn: list[int] = list(self._plans)
        self.stopped: list[int] = []
        self.closed = False
        self.delivered_tokens = 0
        self._heard: list[Delta] = []
        self._failed: Exception | None = None
        self._listening: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        return 0 if self.closed else len(self._turn)

    def __aiter__(self) -> FakeSession:
        return self

    async def __anext__(self) -> list[Delta]:
        if not self._turn or self.closed:
            raise StopAsyncIteration
        script, _ = self._plans[self._turn[0]]
        if script.delay_s:
            await asyncio.sleep(script.delay_s)
        else:
            await asyncio.sleep(0)
        if not self._turn or self.closed:
            raise StopAsyncIteration
        deltas: list[Delta] = []
        while self._turn and len(deltas) < script.together:
            deltas.append(self._next())
        return deltas

    def listen(self, call: Callable[[], None]) -> None:
        self._listening = asyncio.create_task(self._tell(call))

    async def _tell(self, call: Callable[[], None]) -> None:
        """What iterating gives, one after the other."""
        while self._failed is None and not self.closed:
            try:
                self._heard += await self.__anext__()
            except Exception as error:
                self._failed = error
            call()
            await asyncio.sleep(0)  # whoever was told may close it

    def take(self) -> list[Delta]:
        if not self._heard and self._failed is not None:
            raise self._failed
        heard, self._heard = self._heard, []
        return heard

    def _next(self) -> Delta:
        index = self._turn.pop(0)
        delta = next(self._plans[index][1])
        self.delivered_tokens += len(delta.token_ids)
        if delta.finish is None:
            self._turn.append(index)
        return delta

    def stop(self, index: int) -> None:
        self.stopped.append(index)
        if index in self._turn:
            self._turn.remove(index)

    def close(self) -> None:
        self.closed = True
        if self._listening is not None:
            self._listening.cancel()


def deltas_of(index: int, request: GenerateRequest, script: Script) -> Iterable[Delta]:
    """The Deltas of one choice, each made when it is due."""
    sampling = request.sampling
    tokens = script.tokens[: sampling.max_tokens]
    cut = len(tokens) < len(script.tokens)
    finish, stop_id = (FinishReason.LENGTH, None) if cut else (script.finish, script.stop_id)
    scores: tuple[TokenLogprobs | None, ...] = ()
    if sampling.prompt_logprobs is not None:
        scores = (None, *(token_logprobs(i, sampling.prompt_logprobs) for i in request.prompt_ids[1:]))
    starts = range(0, len(tokens), script.per_delta) if tokens else [0]
    for start in starts:
        if script.raise_after is not None and start >= script.raise_after:
            raise RuntimeError("the engine broke")
        part = tokens[start : start + script.per_delta]
        last = start + script.per_delta >= len(tokens) and not script.finish_alone
        yield Delta(
            index=index,
            token_ids=part,
            logprobs=() if sampling.logprobs is None else tuple(token_logprobs(i, sampling.logprobs) for i in part),
            prompt_logprobs=scores if start == 0 else (),
            cached_tokens=script.cached_tokens if start == 0 else None,
            queue_time_s=script.queue_time_s if start == 0 else None,
            finish=finish if last else None,
            stop_id=stop_id if last else None,
            error=script.error if last else "",
        )
    if script.finish_alone:
        yield Delta(index=index, finish=finish, stop_id=stop_id, error=script.error)
