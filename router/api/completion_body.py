"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from router.api.limits import CHOICES_MAX, MAX_TOKENS_MAX, TOP_LOGPROBS_MAX
from router.api.sampling_body import SamplingBody

Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    if all(type(item) is int for item in value):
        return (_ids(value),)
    if len(value) > CHOICES_MAX:
        raise ValueError(f"at most {CHOICES_MAX} prompts")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and all(type(i) is int for i in item) for item in value):
        return tuple(_ids(item) for item in value)
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")


def _ids(value: list[int]) -> tuple[int, ...]:
    if not all(0 <= i < 2**31 for i in value):
        raise ValueError("has a token id out of range")
    return tuple(value)


class CompletionBody(SamplingBody):
    prompt: Annotated[Any, BeforeValidator(_prompts)]
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_MAX)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    add_special_tokens: bool | None = None
