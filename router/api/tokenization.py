"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from starlette.types import Receive, Scope, Send

from router.api.body import ClientDisconnected
from router.api.chat_body import read_messages, template_variables
from router.api.context import Context
from router.api.endpoints import check_model, validated
from router.api.errors import bad_request
from router.api.header_fields import header_fields
from router.api.logprobs import token_name
from router.api.prompts import PromptIds, check_ids, conversation_of, render_chat
from router.api.respond import respond_json
from router.api.sampling_body import Body, token_ids
from router.api.unsupported import refuse_unsupported


class TokenizeBody(Body):
    """Either a text, or messages to be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[Any, BeforeValidator(template_variables)] = Field(default_factory=dict)
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[Any, BeforeValidator(token_ids)]


class Tokenize:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        try:
            taken = await context.intake.parse(await context.intake.read(receive, header_fields(scope)))
        except ClientDisconnected:
            return
        refuse_unsupported(taken.fields)
        body = validated(TokenizeBody, taken.fields)
        if body.model is not None:
            check_model(body.model, context)
        ids = await context.pool.run(lambda: self._ids(body), is_short=taken.is_short)
        limits = context.limits()
        answer = {
            "count": len(ids),
            "max_model_len": None if limits is None else limits.max_model_len,
            "tokens": ids,
            "token_strs": [token_name(context.model.tokenizer, i) for i in ids] if body.return_token_strs else None,
        }
        await respond_json(scope, send, answer)

    def _ids(self, body: TokenizeBody) -> PromptIds:
        model = self._context.model
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "give either prompt or messages")
        if body.prompt is not None:
            return model.tokenizer.encode(body.prompt, parse_special=True, add_special=body.add_special_tokens is not False)
        messages = read_messages(body.messages)
        return render_chat(
            conversation_of(body.add_generation_prompt, body.continue_final_message, messages, body.chat_template_kwargs), model, None
        )


class Detokenize:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        try:
            taken = await context.intake.parse(await context.intake.read(receive, header_fields(scope)))
        except ClientDisconnected:
            return
        body = validated(DetokenizeBody, taken.fields)
        if body.model is not None:
            check_model(body.model, context)
        if body.tokens is None:
            raise bad_request("tokens", "tokens must be a list of token ids")
        check_ids(body.tokens, "tokens", context.model, context.limits())
        text = await context.pool.run(lambda: context.model.tokenizer.decode(body.tokens, skip_special=False), is_short=taken.is_short)
        await respond_json(scope, send, {"prompt": text})
