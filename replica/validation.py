"""Checks on what comes over the wire: a request that cannot be carried out is refused before it touches anything."""

from __future__ import annotations

import math
from collections.abc import Iterable

from replica.contract.blocks import KEY_BYTES
from replica.contract.messages import EngineLimits, GenerateRequest, SamplingParams

LOGPROBS_MAX = 1_024  # alternatives per position the engine is willing to report
BIAS_MAX = 100.0
SCORES_MAX = 3_000_000  # entries of one prompt's logprobs: at most 15 bytes each, and they travel in one frame
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1


def fault_of(request: GenerateRequest, limits: EngineLimits) -> str:
    """One line that says what is wrong with `request`; empty if nothing is."""
    if not request.prompt_ids:
        return "the prompt is empty"
    vocab = limits.vocab_size
    if not _in_vocabulary(request.prompt_ids, vocab) or not _in_vocabulary(request.emitted_ids, vocab):
        return f"a token id is outside the vocabulary of {vocab}"
    if any(len(key) != KEY_BYTES for key in request.block_keys):
        return f"a block key has not {KEY_BYTES} bytes"
    if not _is_text(request.adapter):
        return "adapter is no text"
    if request.choice < 0:
        return "choice must not be negative"
    if request.deadline_s is not None and not math.isfinite(request.deadline_s):
        return "deadline_s must be finite"
    return _sampling_fault(request.sampling, vocab) or _scores_fault(request)


def _scores_fault(request: GenerateRequest) -> str:
    wanted = request.sampling.prompt_logprobs
    if wanted is None or len(request.prompt_ids) * (wanted + 1) <= SCORES_MAX:
        return ""
    return f"prompt_logprobs {wanted} of a prompt of {len(request.prompt_ids)} tokens: more than {SCORES_MAX} entries"


def _sampling_fault(sampling: SamplingParams, vocab: int) -> str:
    s = sampling
    ranges = (
        ("seed", s.seed, _SEED_MIN, _SEED_MAX),
        ("max_tokens", s.max_tokens, 0, 2**31 - 1),
        ("min_tokens", s.min_tokens, 0, 2**31 - 1),
        ("temperature", s.temperature, 0.0, 100.0),
        ("top_k", s.top_k, 0, 2**31 - 1),
        ("min_p", s.min_p, 0.0, 1.0),
        ("presence_penalty", s.presence_penalty, -100.0, 100.0),
        ("frequency_penalty", s.frequency_penalty, -100.0, 100.0),
        ("logprobs", s.logprobs or 0, 0, LOGPROBS_MAX),
        ("prompt_logprobs", s.prompt_logprobs or 0, 0, LOGPROBS_MAX),
    )
    for name, value, least, most in ranges:
        if not least <= value <= most:  # False for NaN as well
            return f"{name} must be between {least} and {most}, not {value}"
    if not 0.0 < s.top_p <= 1.0:
        return f"top_p must be above 0 and at most 1, not {s.top_p}"
    if not 0.0 < s.repetition_penalty <= 100.0:
        return f"repetition_penalty must be above 0 and at most 100, not {s.repetition_penalty}"
    return _token_fault(s, vocab)


def _token_fault(sampling: SamplingParams, vocab: int) -> str:
    """Token ids inside the sampling parameters."""
    if not _in_vocabulary((token for token, _ in sampling.logit_bias), vocab):
        return f"logit_bias names a token outside the vocabulary of {vocab}"
    if not all(-BIAS_MAX <= bias <= BIAS_MAX for _, bias in sampling.logit_bias):  # False for NaN as well
        return f"logit_bias must be between {-BIAS_MAX} and {BIAS_MAX}"
    if not _in_vocabulary(sampling.stop_token_ids, vocab):
        return f"stop_token_ids names a token outside the vocabulary of {vocab}"
    if any(not word or not _in_vocabulary(word, vocab) for word in sampling.bad_words):
        return "bad_words has an empty entry or a token outside the vocabulary"
    allowed = sampling.allowed_token_ids
    if allowed is not None and (not allowed or not _in_vocabulary(allowed, vocab)):
        return "allowed_token_ids is empty or names a token outside the vocabulary"
    return ""


def _is_text(name: str) -> bool:
    """It can be encoded: half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _in_vocabulary(tokens: Iterable[int], vocab: int) -> bool:
    listed = tuple(tokens)
    return not listed or (min(listed) >= 0 and max(listed) < vocab)
