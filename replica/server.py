"""A whole replica in one object: runner, engine, its thread, and the link that routers connect to. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replica.config import EngineConfig
from replica.contract.messages import EngineLimits, StepTimeCoefficients
from replica.engine import Engine
from replica.engine_loop import EngineLoop, Pulse
from replica.engine_thread import EngineThread
from replica.link import Incarnation, LinkLimits, LinkServer
from replica.mock_runner import MockRunner
from replica.step import AsynchronousRunner, Runner
from replica.warm_up import warm_up

if TYPE_CHECKING:
    from replica.parallel.group import RankGroup  # imports torch, which a mock replica does without

STALL_MIN_S = 2.0  # no progress for max(this, STALL_STEPS × predicted step) while work is pending: stalled
STALL_STEPS = 4.0


class Unhealthy(Exception):
    """The replica is to be replaced; says why."""


@dataclass(frozen=True, slots=True)
class _Parts:
    runner: Runner
    engine: Engine
    loop: EngineLoop
    link: LinkServer
    address: tuple[str, int]


class ReplicaServer:
    """start(), serve over the link at `address`, drain(), stop(). Everything here runs on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        replica_id: str,
        secret: bytes,
        host: str = "127.0.0.1",
        on_stage: Callable[[str, float], None] | None = None,
        runner: Runner | None = None,
        group: RankGroup | None = None,
        link_limits: LinkLimits | None = None,
        tls: ssl.SSLContext | None = None,
        recall_step_time: Callable[[tuple[str, ...]], StepTimeCoefficients | None] | None = None,
    ) -> None:
        """`runner` replaces the configured one; `group`: this is rank 0 of it, the other ranks run parallel.broadcast.rank_main.

        `recall_step_time`, given what computes (the model's files and the kernels in words), says what steps of a replica like this one
        take, if anybody has measured: then the warm-up measures nothing. It is called once, in the engine's thread, and not for a mock.
        """
        self._config = config
        self._replica_id = replica_id
        self._secret = secret
        self._host = host
        self._on_stage = on_stage
        self._given_runner = runner
        self._group = group
        self._link_limits = link_limits
        self._tls = tls
        self._recall_step_time = recall_step_time
        self.epoch = time.time_ns()
        self._parts: _Parts | None = None

    async def start(self) -> None:
        """Load the model, start the engine's thread, listen. Raises ValueError for limits that cannot be kept, ModelError for the model."""
        started_s = time.monotonic()
        thread = EngineThread()
        try:
            runner = self._given_runner
            if runner is None:
                runner = await asyncio.wrap_future(thread.submit(self._make_runner))
            try:
                _check_limits(self._config, runner.limits)
                self._parts = await self._assemble(runner, thread)
            except BaseException:
                runner.close()
                raise
        except BaseException:
            thread.end()
            raise
        if self._on_stage is not None:
            self._on_stage("replica ready", time.monotonic() - started_s)

    @property
    def address(self) -> tuple[str, int]:
        return self._started().address

    @property
    def limits(self) -> EngineLimits:
        return self._started().engine.limits

    @property
    def step_time(self) -> StepTimeCoefficients:
        """What is known of its steps by now."""
        return self._started().engine.step_time.coefficients

    async def drain(self, timeout_s: float) -> bool:
        """Bounce new work; True once no attempt is left, False when the time was up before."""
        return await self._started().link.drain(timeout_s)

    async def stop(self) -> None:
        """Close the link, end the thread after the running step, free the runner. Idempotent."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        await parts.link.stop()
        await parts.loop.stop()
        if not parts.loop.pulse().alive:  # else a step hangs in it: the process must end instead
            await asyncio.to_thread(parts.runner.close)

    def check_health(self) -> None:
        """Raises Unhealthy when the engine's thread is dead, or stalls with work pending."""
        parts = self._started()
        pulse = parts.loop.pulse()
        if not pulse.alive:
            raise Unhealthy(f"the engine is dead: {pulse.reason}")
        if pulse.pending_work and pulse.waiting_s > self._stall_s():
            raise Unhealthy(f"no progress for {pulse.waiting_s:.1f} s with work pending, after step {pulse.progress}")

    def pulse(self) -> Pulse:
        return self._started().loop.pulse()

    def stats(self) -> dict[str, float]:
        """Flat numbers, for autoscaling and metrics: the last load report, the limits, and what the link holds."""
        parts = self._started()
        fanout, limits = parts.link.fanout, parts.engine.limits
        load = fanout.load
        return {
            "running": load.running,
            "waiting": load.waiting,
            "queued_prefill_tokens": load.queued_prefill_tokens,
            "context_tokens": load.context_tokens,
            "free_blocks": load.free_blocks,
            "evictable_blocks": load.evictable_blocks,
            "num_blocks": limits.num_blocks,
            "block_size": limits.block_size,
            "kv_usage": 1.0 - (load.free_blocks + load.evictable_blocks) / limits.num_blocks,
            "kv_bytes_used": load.kv_bytes_used,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "step_time_a": load.step_time.a,
            "step_time_b": load.step_time.b,
            "step_time_c": load.step_time.c,
            "step_time_d": load.step_time.d,
            "step_time_e": load.step_time.e,
            "predicted_step_s": load.predicted_step_s,
            "progress": load.progress,
            "preemptions": load.preemptions,
            "draining": float(load.draining),
            "attempts": fanout.attempts,
            "routers": len(fanout.routers),
            "kv_event_sequence": fanout.sequence,
            "stalled_s": parts.loop.pulse().waiting_s,
        }

    def _stall_s(self) -> float:
        return max(STALL_MIN_S, STALL_STEPS * self._started().link.fanout.load.predicted_step_s)

    def _started(self) -> _Parts:
        if self._parts is None:
            raise Unhealthy("the replica is not running")
        return self._parts

    def _make_runner(self) -> Runner:
        """Blocking: reads the model."""
        if self._config.runner == "mock":
            return MockRunner.from_config(self._config)
        ranks = 1 if self._group is None else self._group.size
        if ranks != self._config.tensor_parallel_size:
            raise ValueError(f"tensor_parallel_size is {self._config.tensor_parallel_size}, and the replica has {ranks} rank(s)")
        from replica.runner import ModelRunner  # not at the top: it imports torch, which a mock replica does without

        if self._group is None:
            return ModelRunner(self._config, on_stage=self._on_stage)
        from replica.parallel.broadcast import LeadingRunner

        return LeadingRunner(ModelRunner(self._config, tp=self._group, on_stage=self._on_stage), self._group)

    @property
    def dtype(self) -> str:
        """Of weights and KV: 'bfloat16', 'float32', …, or 'mock'."""
        dtype = getattr(_innermost(self._started().runner), "dtype", "mock")
        return str(dtype).removeprefix("torch.")

    @property
    def kernels(self) -> str:
        """What computes, and why it, in one line; '' for a mock."""
        return str(getattr(_innermost(self._started().runner), "kernels", ""))

    def _known(self, held: object) -> StepTimeCoefficients | None:
        if self._recall_step_time is None:
            return None
        return self._recall_step_time(tuple(str(getattr(held, name, "")) for name in ("fingerprint", "revision", "dtype", "kernels")))

    async def _assemble(self, runner: Runner, thread: EngineThread) -> _Parts:
        held = _innermost(runner)  # a real model says what it is; a mock is called after the configuration
        model = self._config.served_model_name or str(getattr(held, "model", self._config.model.rstrip("/").rsplit("/", 1)[-1]))
        revision = str(getattr(held, "revision", self._config.revision or ""))
        known = None
        if held is not self._given_runner and not isinstance(held, MockRunner):  # a mock's steps take what they are told to
            began_s = time.monotonic()
            known = await asyncio.wrap_future(thread.submit(lambda: warm_up(runner, self._config, time.monotonic, self._known(held))))
            if self._on_stage is not None:
                self._on_stage("warm-up", time.monotonic() - began_s)
        block_bytes = int(getattr(held, "kv_block_bytes", 0))
        engine = Engine(runner, self._config, model, revision, time.monotonic, block_bytes, step_time=known)
        me = Incarnation(
            replica_id=self._replica_id,
            epoch=self.epoch,
            model=model,
            revision=revision,
            fingerprint=str(getattr(held, "fingerprint", f"mock:{model}")),
            limits=engine.limits,
        )
        ahead = self._config.async_scheduling
        if ahead is None:
            ahead = isinstance(runner, AsynchronousRunner) and runner.overlaps
        loop = EngineLoop(engine, runner, lambda delivery: link.deliver(delivery), thread=thread, ahead=ahead)
        link = LinkServer(me, loop.inbox, engine.load(), self._secret, limits=self._link_limits, tls=self._tls)
        address = await link.start(self._host)
        loop.start()
        return _Parts(runner, engine, loop, link, address)


def _innermost(runner: Runner) -> object:
    """Behind parallel.broadcast.LeadingRunner, which adds nothing that is asked for here."""
    return getattr(runner, "inner", runner)


def _check_limits(config: EngineConfig, limits: EngineLimits) -> None:
    """An explicit context that cannot be held is refused, never quietly lowered."""
    pool_tokens = limits.num_blocks * limits.block_size
    wanted = config.max_model_len
    if wanted is not None and wanted > pool_tokens:
        raise ValueError(f"max_model_len {wanted} does not fit the KV pool of {pool_tokens} tokens")
    if wanted is not None and wanted > limits.max_model_len:
        raise ValueError(f"max_model_len {wanted} exceeds the model's context of {limits.max_model_len} tokens")
    if limits.max_model_len > pool_tokens:
        raise ValueError(f"a context of {limits.max_model_len} tokens does not fit the KV pool of {pool_tokens} tokens")
