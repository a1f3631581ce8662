"""A scripted engine and a raw router, for tests of the link."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from replica.contract import wire
from replica.contract.messages import (
    PROTOCOL_VERSION,
    Bounce,
    Challenge,
    EngineLimits,
    FinishReason,
    Frame,
    GenerateRequest,
    Hello,
    KvEvent,
    LoadReport,
    SamplingParams,
    StepTimeCoefficients,
    Stored,
    TokenDelta,
    ToReplica,
    ToRouter,
    Welcome,
)
from replica.engine_loop import EngineLoop
from replica.link import Incarnation, LinkLimits, LinkServer
from replica.step import Outcome, Row, Step, StepResult

PATIENCE_S = 10.0  # a test that waits longer has failed
SECRET = b"a secret of the cluster"
LIMITS = EngineLimits(
    max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, num_blocks=256, block_size=16, max_waiting=64, vocab_size=1000
)


def request(attempt: int, max_tokens: int = 1_000_000, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    sampling = SamplingParams(seed=attempt, max_tokens=max_tokens)
    return GenerateRequest(attempt=attempt, request_id=f"r{attempt}", choice=0, prompt_ids=prompt, block_keys=(), sampling=sampling)


@dataclass(frozen=True)
class Output:
    deltas: tuple[tuple[int, TokenDelta], ...] = ()
    events: tuple[KvEvent, ...] = ()


@dataclass
class ScriptedEngine:
    """Every live request gets one token a step. `events_each_step` makes every step store one block."""

    events_each_step: bool = False
    tokens_each: int = 1
    live: dict[tuple[int, int], int] = field(default_factory=dict)  # (owner, attempt) → tokens left
    submitted: list[int] = field(default_factory=list)
    cancelled: list[tuple[int, int]] = field(default_factory=list)
    owners_gone: list[int] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    blocks: list[tuple[bytes, bytes]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    on_submit: Callable[[GenerateRequest], Bounce | None] = lambda request: None
    flushes: list[Output] = field(default_factory=list)
    stuck: bool = False
    predicted_step_s: float = 0.01

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.flushes)

    def submit(self, owner: int, request: GenerateRequest, arrived_s: float | None = None) -> Bounce | None:
        self.threads.add(threading.get_ident())
        self.submitted.append(request.attempt)
        bounce = self.on_submit(request)
        if bounce is None:
            self.live[owner, request.attempt] = request.sampling.max_tokens
        return bounce

    def cancel(self, owner: int, attempt: int) -> None:
        self.cancelled.append((owner, attempt))
        self.live.pop((owner, attempt), None)

    def cancel_owner(self, owner: int) -> None:
        self.owners_gone.append(owner)
        for key in [key for key in self.live if key[0] == owner]:
            del self.live[key]

    def plan(self) -> Step | None:
        self.threads.add(threading.get_ident())
        if not self.live or self.stuck:
            return None
        self.steps += 1
        return Step(self.steps, tuple(Row(attempt, [1], 0, [0]) for _, attempt in self.live))

    def settle(self, step: Step, result: StepResult | Exception) -> Output:
        planned = {row.request for row in step.rows}
        deltas = []
        self.tokens += sum(attempt in planned for _, attempt in self.live)
        for (owner, attempt), left in list(self.live.items()):
            if attempt not in planned:
                continue
            error = str(result) if isinstance(result, Exception) else ""
            finish = FinishReason.ERROR if error else FinishReason.LENGTH if left <= 1 else None
            deltas.append((owner, TokenDelta(attempt=attempt, token_ids=(self.steps,) * self.tokens_each, finish=finish, error=error)))
            self.live[owner, attempt] = left - 1
            if finish is not None:
                del self.live[owner, attempt]
        if not self.events_each_step:
            return Output(tuple(deltas))
        return Output(tuple(deltas), (self.store(),))

    def store(self) -> Stored:
        key, parent = len(self.blocks).to_bytes(16, "little"), self.blocks[-1][0] if self.blocks else b"\xff" * 16
        self.blocks.append((key, parent))
        return Stored(keys=(key,), parent=parent)

    def flush(self) -> Output | None:
        return self.flushes.pop(0) if self.flushes else None

    def load(self) -> LoadReport:
        return LoadReport(
            progress=self.steps,
            running=len(self.live),
            waiting=0,
            queued_prefill_tokens=0,
            context_tokens=0,
            free_blocks=LIMITS.num_blocks - len(self.live),
            evictable_blocks=0,
            step_time=StepTimeCoefficients(0.01, 0.0, 0.0, 0.0),
            predicted_step_s=self.predicted_step_s,
        )

    def snapshot(self) -> tuple[tuple[bytes, bytes], ...]:
        return tuple(self.blocks)


class PacedRunner:
    """A step takes `step_s`. `gate`, when given, must be released for each step; `entered` tells that one waits there."""

    limits = LIMITS
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, step_s: float = 0.002, *, gated: bool = False) -> None:
        self.step_s = step_s
        self.gated = gated
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None

    def execute(self, step: Step) -> StepResult:
        if self.gated:
            self.entered.release()
            self.gate.acquire()
        else:
            time.sleep(self.step_s)
        if self.error is not None:
            raise self.error
        return StepResult(step.step_id, tuple(Outcome(token=1) for _ in step.rows))

    def close(self) -> None:
        """Holds nothing."""


@dataclass
class Replica:
    engine: ScriptedEngine
    runner: PacedRunner
    loop: EngineLoop
    link: LinkServer
    address: tuple[str, int]


@asynccontextmanager
async def replica(
    engine: ScriptedEngine | None = None, runner: PacedRunner | None = None, limits: LinkLimits | None = None
) -> AsyncIterator[Replica]:
    engine, runner = engine or ScriptedEngine(), runner or PacedRunner()
    me = Incarnation("replica-1", 77, "mock", "r0", "fingerprint", LIMITS)
    loop = EngineLoop(engine, runner, lambda delivery: link.deliver(delivery))
    link = LinkServer(me, loop.inbox, engine.load(), SECRET, limits=limits)
    address = await link.start("127.0.0.1")
    loop.start()
    try:
        yield Replica(engine, runner, loop, link, address)
    finally:
        runner.gated = False
        for _ in range(4):
            runner.gate.release()
        await link.stop()
        await loop.stop()
        assert not loop.pulse().alive


class RawRouter:
    """Bytes on a socket, nothing else: what a router may do wrong as well."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> RawRouter:
        return cls(*await asyncio.open_connection(*address))

    @classmethod
    async def join(cls, address: tuple[str, int], router_id: str = "router-1", secret: bytes = SECRET) -> RawRouter:
        """Connected and authenticated."""
        self = await cls.connect(address)
        challenge = await self.read()
        assert isinstance(challenge, Challenge)
        self.write(Hello(PROTOCOL_VERSION, router_id, wire.handshake_mac(secret, challenge.nonce, router_id)))
        welcome = await self.read()
        assert isinstance(welcome, Welcome), welcome
        self.welcome = welcome
        return self

    def write(self, message: ToReplica) -> None:
        self.writer.write(wire.encode(message))

    async def read(self, timeout_s: float | None = None) -> ToRouter:
        async with asyncio.timeout(timeout_s or PATIENCE_S):
            return wire.decode_to_router(await wire.read_body(self.reader))

    async def frame(self, want: Callable[[Frame], bool] = lambda frame: True) -> Frame:
        """The next frame that `want` accepts; others are dropped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.read()
                if isinstance(message, Frame) and want(message):
                    return message

    async def is_closed(self) -> bool:
        """True when the replica closes; what it still says is dropped."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
            return True

    def close(self) -> None:
        self.writer.transport.abort()


async def until(condition: Callable[[], bool], timeout_s: float | None = None) -> None:
    async with asyncio.timeout(timeout_s or PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions of other threads' objects have no event
            await asyncio.sleep(0.005)
