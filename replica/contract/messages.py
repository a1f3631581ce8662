"""What travels on the link between a router and a replica: values only, each with a name.

Times are seconds. Clocks of two machines are never compared: every time that crosses the link is a *duration*.
`attempt` names one try of one choice on one replica. The router draws it from a counter it never winds back, so a
message about an attempt that was moved, cancelled or belongs to a dead incarnation can be told apart and dropped.
"""

from __future__ import annotations

import enum

import msgspec

PROTOCOL_VERSION = 1


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages: positional msgpack arrays, immutable."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop id, or a stop string found by the router
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # cancelled by the router
    TIMEOUT = "timeout"  # its deadline passed before its first token
    ERROR = "error"  # this request alone failed; `error` says why


class SamplingParams(Wire, frozen=True):
    """How the next token is drawn. Defaults are 'off'. Seed is always given (the router draws it when the client does not)."""

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    allowed_token_ids: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off; k = the drawn token's and the k likeliest
    prompt_logprobs: int | None = None


class GenerateRequest(Wire, frozen=True):
    """One choice of one client request. `choice` is its index in `n`: randomness is a function of (seed, choice, position)."""

    attempt: int
    request_id: str
    choice: int
    prompt_ids: tuple[int, ...]
    block_keys: tuple[bytes, ...]  # keys of the prompt's full blocks (contract.blocks), 16 bytes each
    sampling: SamplingParams
    emitted_ids: tuple[int, ...] = ()  # tokens a previous attempt has already delivered; they count as output
    priority: int = 0  # lower is more urgent
    tenant: str = ""
    request_class: str = "standard"
    adapter: str = ""
    cache_salt: bytes = b""
    queued_s: float = 0.0  # spent at the router before this dispatch
    deadline_s: float | None = None  # time left, from dispatch, until the first token is worthless
    traceparent: str = ""


class TokenLogprobs(Wire, frozen=True):
    """One position: the token's log probability, and the likeliest alternatives as (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenDelta(Wire, frozen=True):
    """What one step brought for one attempt. The first carries what admission learns from; the last has `finish`."""

    attempt: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # as long as token_ids when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # first delta only; entry 0 is None
    cached_tokens: int | None = None  # first delta only: prompt tokens found in the prefix cache
    waited_s: float | None = None  # first delta only: from arrival at the replica to the first step that scheduled it
    finish: FinishReason | None = None
    stop_id: int | None = None  # the stop id that ended it (the last of token_ids)
    error: str = ""


class BounceReason(enum.StrEnum):
    NEVER_FITS = "never_fits"  # prompt + 1 exceeds the context or the pool
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    BAD_REQUEST = "bad_request"  # e.g. a token id outside the vocabulary


class Bounce(Wire, frozen=True):
    """The replica did not take an attempt; the router decides again."""

    attempt: int
    reason: BounceReason
    message: str = ""


class Stored(Wire, frozen=True, tag="stored"):
    """Blocks became findable on the replica. `parent` is the key before keys[0] (the root key for a first block)."""

    keys: tuple[bytes, ...]
    parent: bytes


class Removed(Wire, frozen=True, tag="removed"):
    keys: tuple[bytes, ...]


class Cleared(Wire, frozen=True, tag="cleared"):
    pass


KvEvent = Stored | Removed | Cleared


class StepTimeCoefficients(Wire, frozen=True):
    """t_step = a + b·prefill_tokens + c·decodes + d·Σcontext + e·Σ(prefill·context); seconds. See contract.step_time."""

    a: float
    b: float
    c: float
    d: float
    e: float = 0.0


class EngineLimits(Wire, frozen=True):
    """The limits the engine enforces: the very values, so that the router refuses what the replica would."""

    max_model_len: int  # effective context in tokens: the least of the model's, the configured and the pool's
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    max_waiting: int  # requests; beyond it the replica bounces
    vocab_size: int
    step_slo_s: float | None = None  # the inter-token SLO that bounds a chunk, in seconds


class LoadReport(Wire, frozen=True):
    """State of the engine after its last step. `progress` counts finished steps and never stands still while work runs."""

    progress: int
    running: int
    waiting: int
    queued_prefill_tokens: int  # tokens still to prefill that no cache holds, of waiting and partly prefilled requests
    context_tokens: int  # Σ computed tokens of running requests
    free_blocks: int
    evictable_blocks: int  # cached and unreferenced
    step_time: StepTimeCoefficients
    predicted_step_s: float  # of the step that runs now, or would
    draining: bool = False
    preemptions: int = 0  # since start
    kv_bytes_used: int = 0
    step_spread: float = 0.0  # of its predictions: a chunk is planned as if steps took longer by this part, 0 … 1
    short_prefill_tokens: int | None = (
        None  # of those queued: of waiting prompts that half of a step completes, which pass others; None: nobody does
    )
    busy_s: float = 0.0  # that steps have taken since start
    foreseen_s: float = 0.0  # that they had been predicted to take


# --- router → replica ------------------------------------------------------------------------------------------------


class Hello(Wire, frozen=True, tag="hello"):
    """Answer to Challenge; `mac` = HMAC-SHA256(secret, nonce + router_id)."""

    protocol: int
    router_id: str
    mac: bytes


class Submit(Wire, frozen=True, tag="submit"):
    requests: tuple[GenerateRequest, ...]


class Cancel(Wire, frozen=True, tag="cancel"):
    attempts: tuple[int, ...]


class WantSnapshot(Wire, frozen=True, tag="want_snapshot"):
    """The router saw a gap: answer with a Snapshot of the findable blocks."""


ToReplica = Hello | Submit | Cancel | WantSnapshot


# --- replica → router ------------------------------------------------------------------------------------------------


class Challenge(Wire, frozen=True, tag="challenge"):
    protocol: int
    nonce: bytes


class Welcome(Wire, frozen=True, tag="welcome"):
    protocol: int
    replica_id: str
    epoch: int  # incarnation: new for every start of the engine
    model: str  # the name it is served under
    revision: str
    fingerprint: str  # of tokenizer + template + weights; another fingerprint is another pool
    limits: EngineLimits
    load: LoadReport


class Refused(Wire, frozen=True, tag="refused"):
    """The handshake failed; the connection closes."""

    reason: str


class Frame(Wire, frozen=True, tag="frame"):
    """Everything one step brought to one router; frames to a router without a stream here may merge several steps.

    `sequence` counts, over an epoch, the steps that brought KV events: the number is the same for every router. A frame
    holds the events of the last `batches` such steps, up to and including number `sequence` (0 batches: no events). So a
    router has missed nothing if and only if `frame.sequence == last sequence it knows + frame.batches`.
    """

    epoch: int
    sequence: int
    load: LoadReport
    deltas: tuple[TokenDelta, ...] = ()
    accepted: tuple[int, ...] = ()  # attempts that entered the engine since the last frame: from now on `load` counts them
    bounces: tuple[Bounce, ...] = ()
    events: tuple[KvEvent, ...] = ()
    batches: int = 0
    routers: int = 1  # connected to this replica


class Snapshot(Wire, frozen=True, tag="snapshot"):
    """All findable blocks as of `sequence`, parents before children: (key, parent)."""

    epoch: int
    sequence: int
    blocks: tuple[tuple[bytes, bytes], ...]


ToRouter = Challenge | Welcome | Refused | Frame | Snapshot
