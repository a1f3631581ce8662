"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator

from router.api.limits import CHOICES_MAX, MAX_TOKENS_MAX, TOP_LOGPROBS_MAX
from router.api.sampling_body import SamplingBody
from router.api.within import within

Prompt = str | tuple[int, ...]
_KINDS = "must be a text, a list of texts, a list of token ids, or a list of such lists"


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists. Whether ids exist is seen with the vocabulary at hand."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError(_KINDS)
    if not value:
        raise ValueError("must not be empty")
    if type(value[0]) is int:
        return (_ids(value),)
    if len(value) > CHOICES_MAX:
        raise ValueError(f"at most {CHOICES_MAX} prompts")
    if all(type(item) is str for item in value):
        return tuple(value)
    if all(type(item) is list for item in value):
        return tuple(_ids(item) for item in value)
    raise ValueError(_KINDS)


def _ids(value: list[Any]) -> tuple[int, ...]:
    """Strictly: 1.0 and true are no ids."""
    try:
        return msgspec.convert(value, tuple[int, ...])
    except msgspec.ValidationError:
        raise ValueError(_KINDS) from None


class CompletionBody(SamplingBody):
    prompt: Annotated[Any, BeforeValidator(_prompts)]
    max_tokens: Annotated[int | None, within(0, MAX_TOKENS_MAX)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, within(0, TOP_LOGPROBS_MAX)] = None
    add_special_tokens: bool | None = None
