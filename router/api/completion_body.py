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
    kinds = set(map(type, value))
    if kinds == {int}:
        return (_ids(value),)
    if len(value) > CHOICES_MAX:
        raise ValueError(f"at most {CHOICES_MAX} prompts")
    if kinds == {str}:
        return tuple(value)
    if kinds == {list} and all(set(map(type, item)) <= {int} for item in value):
        return tuple(_ids(item) for item in value)
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")


def _ids(value: list[int]) -> tuple[int, ...]:
    if value and not 0 <= min(value) <= max(value) < 2**31:
        raise ValueError("has a token id out of range")
    return tuple(value)


class CompletionBody(SamplingBody):
    prompt: Annotated[Any, BeforeValidator(_prompts)]
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_MAX)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    add_special_tokens: bool | None = None
