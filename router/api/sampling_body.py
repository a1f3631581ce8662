"""The fields that completions and chat share, with their ranges. Types are strict: "8" is no number, true is no integer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from router.api.limits import (
    BAD_WORD_CHARACTERS_MAX,
    BAD_WORDS_MAX,
    CACHE_SALT_CHARACTERS_MAX,
    CHOICES_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIAS_VALUE_MAX,
    MAX_TOKENS_MAX,
    PENALTY_MAX,
    PRIORITY_MAX,
    REPETITION_PENALTY_MAX,
    STOP_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    TEMPERATURE_MAX,
    TOKEN_IDS_MAX,
)
from router.api.within import within

_INT64 = 2**63


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI does; null is the default."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > STOP_STRINGS_MAX:
        raise ValueError(f"at most {STOP_STRINGS_MAX} strings")
    if not all(1 <= len(item) <= STOP_CHARACTERS_MAX for item in strings):
        raise ValueError(f"each string must have 1 to {STOP_CHARACTERS_MAX} characters")
    return tuple(strings)


def _bad_words(value: Any) -> tuple[str, ...]:
    words = [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(item, str) for item in words):
        raise ValueError("must be a list of strings")
    if len(words) > BAD_WORDS_MAX:
        raise ValueError(f"at most {BAD_WORDS_MAX} words")
    if not all(1 <= len(item) <= BAD_WORD_CHARACTERS_MAX for item in words):
        raise ValueError(f"each word must have 1 to {BAD_WORD_CHARACTERS_MAX} characters")
    return tuple(words)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object from token id to bias")
    if len(value) > LOGIT_BIAS_MAX:
        raise ValueError(f"at most {LOGIT_BIAS_MAX} entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError("every name must be a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= LOGIT_BIAS_VALUE_MAX:
            raise ValueError(f"every bias must be a number from {-LOGIT_BIAS_VALUE_MAX:g} to {LOGIT_BIAS_VALUE_MAX:g}")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def token_ids(value: Any, count_max: int = TOKEN_IDS_MAX) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) > count_max:  # before it is looked at item by item
        raise ValueError(f"at most {count_max} token ids")
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ValueError("must be a list of token ids")
    return tuple(value)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    return token_ids(value, STOP_TOKEN_IDS_MAX) or ()


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    ids = token_ids(value)
    if ids == ():
        raise ValueError("must allow at least one token")
    return None if ids is None else tuple(dict.fromkeys(ids))  # each choice's request carries them


class SamplingBody(Body):
    """How to draw tokens and when to stop, for one client request."""

    model: str
    n: Annotated[int | None, within(1, CHOICES_MAX)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int | None, within(-_INT64, _INT64 - 1)] = None
    min_tokens: Annotated[int | None, within(0, MAX_TOKENS_MAX)] = None
    temperature: float | None = Field(None, ge=0, le=TEMPERATURE_MAX)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int | None, within(-1, _INT64 - 1)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=REPETITION_PENALTY_MAX)
    presence_penalty: float | None = Field(None, ge=-PENALTY_MAX, le=PENALTY_MAX)
    frequency_penalty: float | None = Field(None, ge=-PENALTY_MAX, le=PENALTY_MAX)
    stop: Annotated[Any, BeforeValidator(_stop_strings)] = ()
    stop_token_ids: Annotated[Any, BeforeValidator(_stop_token_ids)] = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[Any, BeforeValidator(_logit_bias)] = ()
    bad_words: Annotated[Any, BeforeValidator(_bad_words)] = ()
    allowed_token_ids: Annotated[Any, BeforeValidator(_allowed_token_ids)] = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, max_length=CACHE_SALT_CHARACTERS_MAX)
    priority: Annotated[int | None, within(-PRIORITY_MAX, PRIORITY_MAX)] = None
