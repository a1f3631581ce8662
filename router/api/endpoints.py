"""Completions and chat: what each checks, prepares and answers with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from router.api.answer import AnswerHead
from router.api.chat_answer import ChatAnswer
from router.api.chat_body import ChatBody, read_messages
from router.api.choice import ChoiceOptions
from router.api.completion_answer import CompletionAnswer
from router.api.completion_body import CompletionBody
from router.api.context import Context
from router.api.errors import ApiError, bad_request, from_validation
from router.api.generate import Prepared
from router.api.limits import CHOICES_MAX, COMPLETION_TOKENS_DEFAULT
from router.api.prompts import PromptIds, chat_prompt, completion_prompts, refuse_long_ids
from router.api.sampling_body import SamplingBody
from router.api.submission import Arrival, Wanted, build_batch
from router.api.unsupported import refuse_unsupported
from router.text.stop import StopStrings

AnyBody = TypeVar("AnyBody", bound=pydantic.BaseModel)


def validated(kind: type[AnyBody], body: Mapping[str, Any]) -> AnyBody:
    """Raises ApiError 400."""
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        raise from_validation(error) from None


def check_model(name: str, context: Context) -> None:
    """Raises ApiError 404: never another model than the one asked for."""
    if name != context.model.name:
        raise ApiError(404, f"the model {name[:100]!r} does not exist; this server has {context.model.name!r}", "model", "model_not_found")


class Completions:
    path = "/v1/completions"
    id_prefix = "cmpl"

    def __init__(self, context: Context) -> None:
        self._context = context

    def check(self, body: Mapping[str, Any]) -> Callable[[Arrival], Prepared]:
        context = self._context
        refuse_unsupported(body)
        refuse_long_ids(body.get("prompt"), context.limits())
        parsed = validated(CompletionBody, body)
        _check_shared(parsed, parsed.max_tokens, context)
        if (parsed.n or 1) * len(parsed.prompt) > CHOICES_MAX:
            raise bad_request("n", f"n × prompts must not exceed {CHOICES_MAX}")
        max_tokens = COMPLETION_TOKENS_DEFAULT if parsed.max_tokens is None else parsed.max_tokens
        scores = parsed.logprobs if parsed.echo else None
        wanted = Wanted(max_tokens, parsed.logprobs, scores)

        def prepare(arrival: Arrival) -> Prepared:
            prompts = completion_prompts(parsed, context.model, context.limits())
            head = _head(context, arrival, parsed, prompts, parsed.logprobs, echo=bool(parsed.echo))
            return _prepared(context, arrival, parsed, wanted, CompletionAnswer(head), prompts)

        return prepare


class Chat:
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl"

    def __init__(self, context: Context) -> None:
        self._context = context

    def check(self, body: Mapping[str, Any]) -> Callable[[Arrival], Prepared]:
        context = self._context
        refuse_unsupported(body)
        parsed = validated(ChatBody, body)
        messages = read_messages(parsed.messages)
        max_tokens = parsed.max_completion_tokens if parsed.max_tokens is None else parsed.max_tokens
        if parsed.max_tokens is not None and parsed.max_completion_tokens not in (None, parsed.max_tokens):
            raise bad_request("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
        _check_shared(parsed, max_tokens, context)
        if parsed.top_logprobs and not parsed.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs: true")
        logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
        wanted = Wanted(max_tokens, logprobs)

        def prepare(arrival: Arrival) -> Prepared:
            prompts = (chat_prompt(parsed, messages, context.model, context.limits()),)
            head = _head(context, arrival, parsed, prompts, logprobs)
            return _prepared(context, arrival, parsed, wanted, ChatAnswer(head), prompts)

        return prepare


def _check_shared(body: SamplingBody, max_tokens: int | None, context: Context) -> None:
    check_model(body.model, context)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream: true")
    if max_tokens is not None and (body.min_tokens or 0) > max(max_tokens, 0):
        raise bad_request("min_tokens", "min_tokens must not exceed max_tokens")


def _head(
    context: Context, arrival: Arrival, body: SamplingBody, prompts: Sequence[PromptIds], logprobs: int | None, *, echo: bool = False
) -> AnswerHead:
    options = body.stream_options
    return AnswerHead(
        id=arrival.request_id,
        created_s=int(time.time()),
        model=context.model.name,
        tokenizer=context.model.tokenizer,
        prompts=tuple(prompts),
        n=body.n or 1,
        logprobs=logprobs,
        echo=echo,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )


def _prepared(
    context: Context,
    arrival: Arrival,
    body: SamplingBody,
    wanted: Wanted,
    renderer: ChatAnswer | CompletionAnswer,
    prompts: Sequence[PromptIds],
) -> Prepared:
    options = ChoiceOptions(
        tokenizer=context.model.tokenizer,
        stops=StopStrings(body.stop) if body.stop else None,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(body.stop_token_ids),
        nothing_wanted=wanted.max_tokens == 0,
    )
    batch = build_batch(context, arrival, body, prompts, wanted)
    return Prepared(batch, renderer, options, body.n or 1, sum(map(len, prompts)), bool(body.stream))
