"""Server-sent events of a streamed answer, put together from byte templates: a fraction of a microsecond each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from router.api.answer import AnswerHead, Usage
from router.api.errors import ApiError
from router.api.plain_events import PlainEvents

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the text stands in a choice."""

    object_name: bytes
    before_text: bytes
    after_text: bytes
    nothing: bytes  # in place of a text, in the chunk that carries finish_reason


CHAT = Shape(b"chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}')
COMPLETION = Shape(b"text_completion", b'"text":', b"", b'"text":""')


class Chunks:
    """Of one answer."""

    __slots__ = ("_after_text", "_before_text", "_continuous", "_end", "_heads", "_shape", "_start", "_usage_null")

    def __init__(self, shape: Shape, head: AnswerHead) -> None:
        self._shape = shape
        self._start = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,' % (
            orjson.dumps(head.id),
            shape.object_name,
            head.created_s,
            orjson.dumps(head.model),
        )
        self._heads = [self._start + b'"choices":[{"index":%d,' % index for index in range(head.choices)]
        self._usage_null = b',"usage":null' if head.include_usage else b""
        # What nearly every event of text is made of:
        self._before_text = [one + shape.before_text for one in self._heads]
        self._after_text = shape.after_text + b',"logprobs":null,"finish_reason":null'
        self._end = b"}]%b}\n\n" % self._usage_null
        self._continuous = head.continuous_usage

    def text(self, index: int, text: str, usage: Usage, *, logprobs: Any = None, extra: bytes = b"") -> bytes:
        """`extra` goes into the choice: fields with a comma before each."""
        after_text, end = self._after_text, self._end
        if logprobs is not None:
            after_text = b'%b,"logprobs":%b,"finish_reason":null' % (self._shape.after_text, orjson.dumps(logprobs))
        if self._continuous:
            end = b"}]%b}\n\n" % self._usage(usage)
        return b"".join((self._before_text[index], orjson.dumps(text), after_text, extra, end))

    def plain(self, index: int, *, shows_ids: bool) -> PlainEvents | None:
        """What `text` makes of a token without logprobs; None where each event says something of its own."""
        before, after = self._before_text[index], self._after_text
        if self._continuous:
            return None
        if shows_ids:
            return PlainEvents(index, before, after + b',"token_ids":[', True, b"]" + self._end)
        return PlainEvents(index, before, after + self._end, False, b"")

    def raw(self, index: int, content: bytes, usage: Usage, *, outside: bytes = b"") -> bytes:
        """A chunk whose choice begins with `content`; `outside` goes beside `choices`."""
        return b'%b%b,"logprobs":null,"finish_reason":null}]%b%b}\n\n' % (self._heads[index], content, outside, self._usage(usage))

    def finish(self, index: int, reason: str, stop_reason: str | int | None, usage: Usage) -> bytes:
        return b'%b%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b}]%b}\n\n' % (
            self._heads[index],
            self._shape.nothing,
            reason.encode(),
            orjson.dumps(stop_reason),
            self._usage(usage),
        )

    def usage(self, usage: Usage) -> bytes:
        return b'%b"choices":[],"usage":%b}\n\n' % (self._start, orjson.dumps(usage.as_json()))

    def _usage(self, usage: Usage) -> bytes:
        return b',"usage":' + orjson.dumps(usage.as_json()) if self._continuous else self._usage_null


def error_event(error: ApiError) -> bytes:
    """Ends every choice still open."""
    return b"data: " + error.body() + b"\n\n"


def token_ids_field(token_ids: Sequence[int]) -> bytes:
    return b',"token_ids":' + orjson.dumps(token_ids)
