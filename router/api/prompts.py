"""Prompts as token ids, checked against the pool's limits. Everything here runs on a text thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from replica.contract.messages import EngineLimits
from router.api.chat_body import ChatBody, Message
from router.api.completion_body import CompletionBody, Prompt
from router.api.errors import ApiError, bad_request
from router.api.limits import CHOICES_MAX
from router.served_model import ServedModel
from router.text.chat_template import Conversation, TemplateError

PromptIds = tuple[int, ...]


def completion_prompts(body: CompletionBody, model: ServedModel, limits: EngineLimits | None) -> tuple[PromptIds, ...]:
    """Raises ApiError 400. A completions prompt is the client's own: special tokens in it are parsed."""
    prompts: tuple[Prompt, ...] = body.prompt
    encoded: list[PromptIds] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text_fits(prompt, "prompt", model, limits)
            encoded.append(model.tokenizer.encode(prompt, parse_special=True, add_special=body.add_special_tokens is not False))
        else:
            check_ids(prompt, "prompt", model, limits)
            encoded.append(prompt)
    for ids in encoded:
        check_prompt(ids, "prompt", limits)
    return tuple(encoded)


def refuse_long_ids(prompt: object, limits: EngineLimits | None) -> None:
    """Before a long list is looked at item by item. Raises ApiError 400."""
    lists = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
    for ids in lists[:CHOICES_MAX]:
        if limits is not None and isinstance(ids, list) and len(ids) + 1 > limits.max_model_len and type(ids[0]) is int:
            raise _too_long("prompt", str(len(ids)), limits)


def chat_prompt(body: ChatBody, messages: Sequence[Message], model: ServedModel, limits: EngineLimits | None) -> PromptIds:
    """Render and encode. Raises ApiError 400."""
    conversation = conversation_of(body.add_generation_prompt, body.continue_final_message, messages, body.chat_template_kwargs)
    ids = render_chat(conversation, model, limits)
    check_prompt(ids, "messages", limits)
    return ids


def conversation_of(
    add_generation_prompt: bool | None, continue_final_message: bool | None, messages: Sequence[Message], variables: dict[str, object]
) -> Conversation:
    """Raises ApiError 400 for flags that contradict each other."""
    if continue_final_message and add_generation_prompt:
        raise bad_request("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    add = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    return Conversation(messages, add, bool(continue_final_message), variables)


def render_chat(conversation: Conversation, model: ServedModel, limits: EngineLimits | None) -> PromptIds:
    """Raises ApiError 400 when the model has no template, the template refuses, or the text cannot fit."""
    if model.template is None:
        raise bad_request("messages", "this model has no chat template: use /v1/completions")
    try:
        rendered = model.template.render(conversation, model.tokenizer)
    except TemplateError as error:
        raise bad_request("messages", str(error)) from None
    check_text_fits(rendered.text, "messages", model, limits)
    return model.tokenizer.encode_guarded(rendered.text, rendered.guard)


def check_text_fits(text: str, param: str, model: ServedModel, limits: EngineLimits | None) -> None:
    """Refuse what cannot fit before any work is spent on it."""
    if limits is None:
        return
    least = model.tokenizer.tokens_at_least(text, limits.max_model_len)
    if least + 1 > limits.max_model_len:
        raise _too_long(param, f"at least {least}", limits)


def check_prompt(ids: PromptIds, param: str, limits: EngineLimits | None) -> None:
    """At least one token, and room for one more."""
    if not ids:
        raise bad_request(param, "the prompt has no token: it must have at least one", "empty_prompt")
    if limits is not None and len(ids) + 1 > limits.max_model_len:
        raise _too_long(param, str(len(ids)), limits)


def check_ids(ids: Sequence[int], param: str, model: ServedModel, limits: EngineLimits | None) -> None:
    """Every id is in the vocabulary, the tokenizer's and the model's."""
    size = model.tokenizer.vocab_size if limits is None else min(limits.vocab_size, model.tokenizer.vocab_size)
    try:
        msgspec.convert(ids, _ids_below(size))  # one pass in C: a prompt has thousands
    except msgspec.ValidationError:
        raise bad_request(param, f"{param} has a token id outside the vocabulary (0 to {size - 1})") from None


@lru_cache(maxsize=8)
def _ids_below(size: int) -> Any:
    return tuple[Annotated[int, msgspec.Meta(ge=0, lt=size)], ...]


def _too_long(param: str, tokens: str, limits: EngineLimits) -> ApiError:
    return bad_request(
        param,
        f"this model's context is {limits.max_model_len} tokens; the prompt has {tokens} tokens and needs room for one more",
        "context_length_exceeded",
    )
