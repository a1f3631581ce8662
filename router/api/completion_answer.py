"""Answers of /v1/completions."""

from __future__ import annotations

from typing import Any

import orjson

from router.api.answer import AnswerHead, Usage, WholeChoice
from router.api.choice import Piece
from router.api.chunks import COMPLETION, Chunks, token_ids_field
from router.api.logprobs import LegacyLogprobs, joined
from router.api.plain_events import PlainEvents
from router.api.prompts import PromptIds
from router.ports import Delta


class CompletionAnswer:
    __slots__ = ("_chunks", "_head", "_logprobs", "_shows_ids", "_shows_tokens")

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._chunks = Chunks(COMPLETION, head)
        self._shows_ids = head.token_ids
        self._shows_tokens = head.token_ids or head.logprobs is not None
        self._logprobs = None if head.logprobs is None else [LegacyLogprobs(head.tokenizer, head.logprobs) for _ in range(head.choices)]

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        """The echoed prompt, with its logprobs; and its ids, if they are to be shown."""
        head = self._head
        prompt = self._prompt(delta.index)
        if not head.echo and not head.token_ids:
            return b""
        extra = b',"prompt_token_ids":' + orjson.dumps(prompt) if head.token_ids else b""
        logprobs = None
        if head.echo and self._logprobs is not None:
            logprobs = self._logprobs[delta.index].prompt(prompt, delta.prompt_logprobs)
        return self._chunks.text(delta.index, self._echo(prompt), usage, logprobs=logprobs, extra=extra)

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        events = b""
        if piece.text or (self._shows_tokens and piece.token_ids):
            extra = token_ids_field(piece.token_ids) if self._shows_ids else b""
            logprobs = None if self._logprobs is None else self._logprobs[index].output(piece.logprobs)
            events = self._chunks.text(index, piece.text, usage, logprobs=logprobs, extra=extra)
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
            "object": "text_completion",
            "created": head.created_s,
            "model": head.model,
            "choices": [self._whole(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.as_json(),
        }
        return orjson.dumps(answer)

    def _whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        head = self._head
        prompt = self._prompt(index)
        shown: dict[str, Any] = {
            "index": index,
            "text": self._echo(prompt) + "".join(choice.texts),
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self._logprobs is not None:
            writer = self._logprobs[index]
            block = writer.prompt(prompt, choice.prompt_logprobs) if head.echo else None
            shown["logprobs"] = joined(block, writer.output(choice.logprobs))
        if head.token_ids:
            shown["token_ids"] = choice.token_ids
            shown["prompt_token_ids"] = prompt
        return shown

    def _prompt(self, index: int) -> PromptIds:
        return self._head.prompts[index // self._head.n]

    def _echo(self, prompt: PromptIds) -> str:
        """What the model saw, which may be less than what was sent: text and logprobs agree."""
        return self._head.tokenizer.decode(prompt, skip_special=False) if self._head.echo else ""
