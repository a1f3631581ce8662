"""The seam between the HTTP API and the dispatcher: what the API asks for and what it is told.

The API turns a body into a Batch and renders Deltas; it knows no replica. The dispatcher admits a Batch, keeps its
streams alive across replicas and yields Deltas; it knows no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from replica.contract.messages import EngineLimits, FinishReason, GenerateRequest, TokenLogprobs
from router.policy.classes import Terms
from router.policy.prediction import Prediction


class Batch(msgspec.Struct, frozen=True, gc=False):
    """All choices of one client request, admitted or refused together. `requests[i].attempt` is 0: the dispatcher numbers attempts."""

    request_id: str
    requests: tuple[GenerateRequest, ...]
    arrival_s: float  # monotonic clock of this router
    queue_time_slo_s: float | None = None  # a header's overrides; None = the class's
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None

    @property
    def terms(self) -> Terms:
        first = self.requests[0]
        return Terms(first.request_class, first.tenant, self.queue_time_slo_s, self.ttft_slo_s, self.tpot_slo_s)


@dataclass(frozen=True, slots=True)
class Failure:
    """As `Rejected`, of a choice whose tokens were passed on already."""

    status: int
    reason: str
    retry_after_s: float | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New tokens of requests[index]. A choice ends with exactly one Delta that has `finish`; nothing follows it."""

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int | None = None
    queue_time_s: float | None = None  # first Delta only: arrival here until the first step that scheduled the choice
    finish: FinishReason | None = None
    stop_id: int | None = None
    error: str = ""
    failure: Failure | None = None  # of a choice that was given up: what to say of it
    predicted: Prediction | None = None  # beside queue_time_s and cached_tokens: what had been expected


class Rejected(Exception):
    """Nothing was generated. `status` 429 (shed), 503 (no healthy replica) or 400 (never fits)."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # e.g. queue_time, queue_full, no_replica, never_fits
        self.message = message
        self.retry_after_s = retry_after_s


class Session(Protocol):
    """One admitted Batch. Iterate until StopAsyncIteration; every choice has had its `finish` by then."""

    def __aiter__(self) -> Session: ...

    async def __anext__(self) -> Sequence[Delta]:
        """All that have come since the last time, in order; at least one."""
        ...

    def listen(self, call: Callable[[], None]) -> None:
        """Instead of iterating: from now on `call` is called on the loop whenever something has come, once in a turn or more often."""
        ...

    def take(self) -> Sequence[Delta]:
        """As iterating, but for waiting: nothing, if nothing has come."""
        ...

    def stop(self, index: int) -> None:
        """The API needs no more of this choice (a stop string was found): cancel it at the replica, yield no Delta of it any more."""
        ...

    def close(self) -> None:
        """Cancel whatever still runs. Idempotent; called on disconnect and at the end."""
        ...


class PoolFacts(msgspec.Struct, frozen=True, gc=False):
    """What every request is checked and named by; costs the same for any number of replicas."""

    limits: EngineLimits | None  # None while no replica has been seen
    model: str
    revision: str
    block_size: int


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What /health, /ready and /v1/models say."""

    ready: bool  # a request would be served now
    live: bool  # False once work is pending and no replica has made progress for the stall limit
    replicas: int  # connected
    limits: EngineLimits | None  # None while no replica has been seen
    model: str
    revision: str
    block_size: int
    reason: str = ""  # why not ready, in one line
    running: int = 0  # requests in a step or between two, all replicas
    waiting: int = 0  # requests queued at replicas
    queued: int = 0  # requests queued at this router
    kv_usage: float = 0.0  # part of the fleet's KV blocks that is referenced, 0–1
    moves: int = 0  # streams that went on at another replica, since this router started
    preemptions: int = 0  # of the replicas connected, each since its start


@dataclass(frozen=True, slots=True)
class Total:
    """A count that only grows; or, where `is_gauge`, a value of now."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    is_gauge: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """What has happened so far."""

    totals: Sequence[Total] = ()  # for metrics
    decisions: Sequence[Mapping[str, object]] = ()  # the last ones, oldest first, ready for JSON


class Backend(Protocol):
    async def open(self, batch: Batch) -> Session:
        """Admit or refuse. Returns once the batch is *placed*; raises Rejected otherwise (also when waiting became hopeless)."""
        ...

    def foresee(self, arrival_s: float, terms: Terms, about_tokens: int) -> Rejected | None:
        """The refusal that any request would get now, so that no text is tokenized for nothing; None: open() decides.

        `about_tokens` is a guess of its size: how long it would keep others waiting who are told to come back.
        """
        return None

    def facts(self) -> PoolFacts: ...

    def status(self) -> PoolStatus:
        """Sums over all replicas: for pages, not for requests."""
        ...

    def account(self) -> Account: ...
