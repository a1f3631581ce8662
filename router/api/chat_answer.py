"""Answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import orjson

from router.api.answer import AnswerHead, Usage, WholeChoice
from router.api.choice import Piece
from router.api.chunks import CHAT, Chunks, token_ids_field
from router.api.logprobs import chat_logprobs
from router.api.plain_events import PlainEvents
from router.ports import Delta

_ROLE = b'"delta":{"role":"assistant","content":""}'


class ChatAnswer:
    __slots__ = ("_chunks", "_head", "_shows_ids", "_shows_tokens")

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._chunks = Chunks(CHAT, head)
        self._shows_ids = head.token_ids
        self._shows_tokens = head.token_ids or head.logprobs is not None

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        outside = b',"prompt_token_ids":' + orjson.dumps(self._head.prompts[0]) if self._head.token_ids else b""
        return self._chunks.raw(delta.index, _ROLE, usage, outside=outside)

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        events = b""
        if piece.text or (self._shows_tokens and piece.token_ids):
            extra = token_ids_field(piece.token_ids) if self._shows_ids else b""
            events = self._chunks.text(index, piece.text, usage, logprobs=self._logprobs(piece), extra=extra)
        if piece.finish is not None:
            events += self._chunks.finish(index, piece.finish, piece.stop_reason, usage)
        return events

    def plain(self, index: int) -> PlainEvents | None:
        return None if self._head.logprobs is not None else self._chunks.plain(index, shows_ids=self._shows_ids)

    def closing(self, usage: Usage) -> bytes:
        return self._chunks.usage(usage) if self._head.include_usage else b""

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        head = self._head
        answer: dict[str, Any] = {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created_s,
            "model": head.model,
            "choices": [self._whole(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.as_json(),
        }
        if head.token_ids:
            answer["prompt_token_ids"] = head.prompts[0]
        return orjson.dumps(answer)

    def _whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        head = self._head
        shown: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if head.logprobs is not None:
            shown["logprobs"] = {"content": chat_logprobs(head.tokenizer, choice.logprobs, head.logprobs), "refusal": None}
        if head.token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._head.logprobs is None:
            return None
        return {"content": chat_logprobs(self._head.tokenizer, piece.logprobs, self._head.logprobs), "refusal": None}
