"""From a checked body and its prompt ids to the Batch that the dispatcher gets."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import EngineLimits, GenerateRequest, SamplingParams
from router.api.context import Context
from router.api.prompts import PromptIds, check_ids
from router.api.sampling_body import SamplingBody
from router.policy.classes import Terms
from router.ports import Batch
from router.served_model import ServedModel

_SEED_BITS = 63
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: nothing of the key itself but what is derived from it."""

    tenant: str = ""  # its name in the configuration, or a stable hash of the key
    salt_key: bytes = b""  # tenants never share cached blocks: their timing would tell what others asked


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a client request beside its body."""

    request_id: str
    arrival_s: float  # monotonic
    caller: Caller
    traceparent: str = ""
    terms: Terms = Terms()  # noqa: RUF009  # frozen


@dataclass(frozen=True, slots=True)
class Wanted:
    """What differs between the endpoints: the limit of tokens (None = what fits) and the logprobs."""

    max_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def cache_salt(caller: Caller, client_salt: str | None) -> bytes:
    """b"" = shared by everyone: no key, no salt."""
    if not caller.salt_key and not client_salt:
        return b""
    return hmac.new(caller.salt_key or b"open", b"cache-salt:" + (client_salt or "").encode(), hashlib.sha256).digest()[:_SALT_BYTES]


def build_batch(context: Context, arrival: Arrival, body: SamplingBody, prompts: Sequence[PromptIds], wanted: Wanted) -> Batch:
    """One GenerateRequest per prompt and choice, prompt-major. Hashes the prompts' blocks; runs on a text thread. Raises ApiError 400."""
    facts = context.backend.facts()
    salt = cache_salt(arrival.caller, body.cache_salt)
    root = root_key(model=facts.model, revision=facts.revision, cache_salt=salt)
    base = _sampling(body, context.model, facts.limits)
    terms = arrival.terms
    requests: list[GenerateRequest] = []
    for ids in prompts:
        # Without a seed each prompt gets its own: equal prompts of one body are different draws.
        seed = context.random_bits(_SEED_BITS) if body.seed is None else body.seed % 2**_SEED_BITS
        max_tokens = _max_tokens(wanted.max_tokens, ids, facts.limits)
        sampling = structs.replace(
            base,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min(base.min_tokens, max_tokens),
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
        )
        keys = block_keys(root, ids, facts.block_size)
        requests += [
            GenerateRequest(
                attempt=0,
                request_id=arrival.request_id,
                choice=choice,
                prompt_ids=ids,
                block_keys=keys,
                sampling=sampling,
                priority=body.priority or 0,
                tenant=arrival.caller.tenant,
                request_class=terms.request_class,
                cache_salt=salt,
                traceparent=arrival.traceparent,
            )
            for choice in range(body.n or 1)
        ]
    return Batch(arrival.request_id, tuple(requests), arrival.arrival_s, terms.queue_time_slo_s, terms.ttft_slo_s, terms.tpot_slo_s)


def _max_tokens(wanted: int | None, ids: PromptIds, limits: EngineLimits | None) -> int:
    """Clamped to what fits. An engine always draws one: the API drops it where none was wanted."""
    fits = 2**31 - 1 if limits is None else limits.max_model_len - len(ids)
    return max(1, fits if wanted is None else min(wanted, fits))


def _sampling(body: SamplingBody, model: ServedModel, limits: EngineLimits | None) -> SamplingParams:
    """What all prompts of the body share; seed and token limits are filled in for each."""
    for name, ids in (
        ("stop_token_ids", body.stop_token_ids),
        ("allowed_token_ids", body.allowed_token_ids or ()),
        ("logit_bias", [token for token, _ in body.logit_bias]),
    ):
        check_ids(ids, name, model, limits)
    top_k = body.top_k or 0
    return SamplingParams(
        seed=0,
        max_tokens=1,
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=0 if top_k < 0 or top_k >= model.tokenizer.vocab_size else top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias,
        bad_words=_bad_word_ids(body.bad_words, model),
        allowed_token_ids=body.allowed_token_ids,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
    )


def _bad_word_ids(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """A word within a text usually has a space before it, and then other tokens: both are banned."""
    spellings = (model.tokenizer.encode(text, parse_special=False) for word in words for text in (word, f" {word}"))
    return tuple(dict.fromkeys(ids for ids in spellings if ids))
