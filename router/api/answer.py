"""What an answer is made of, whatever its shape: the values that both endpoints render."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from replica.contract.messages import TokenLogprobs
from router.api.choice import Piece
from router.api.plain_events import PlainEvents
from router.api.prompts import PromptIds
from router.api.record import Record
from router.ports import Delta
from router.text.tokenizer import Tokenizer


class AnswerHead(msgspec.Struct, frozen=True, gc=False):
    """Fixed before the first token. `prompts[i // n]` belongs to choice i."""

    id: str
    created_s: int  # Unix time
    model: str
    tokenizer: Tokenizer
    prompts: tuple[PromptIds, ...]
    n: int
    logprobs: int | None = None  # alternatives wanted; None = no logprobs
    echo: bool = False
    token_ids: bool = False  # show ids beside the text
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


class Usage:
    """Of one request, as of when it is asked."""

    __slots__ = ("_record",)

    def __init__(self, record: Record) -> None:
        self._record = record

    def as_json(self) -> dict[str, object]:
        record = self._record
        return {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "total_tokens": record.prompt_tokens + record.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
        }


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is not streamed, as it grows."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: str = ""
    stop_reason: str | int | None = None

    def add(self, delta: Delta, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason


class Renderer(Protocol):
    """One endpoint's wire format."""

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        """Events before a choice's first piece."""
        ...

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Events of a piece: none when there is nothing to show."""
        ...

    def plain(self, index: int) -> PlainEvents | None:
        """The same of a choice's tokens that are text as they are; None where that is not all that their events show."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The usage event, if asked for."""
        ...

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...
