"""Log probabilities in OpenAI's two shapes: chat's list of objects, and completions' parallel lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from replica.contract.messages import TokenLogprobs
from router.api.limits import IMPOSSIBLE_LOGPROB
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer


def finite(logprob: float) -> float:
    """JSON has no −∞."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE_LOGPROB


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """Entries of choices[].logprobs.content, the `top` likeliest with each."""
    return [
        _chat_entry(tokenizer, token.token_id, token.logprob)
        | {"top_logprobs": [_chat_entry(tokenizer, other, logprob) for other, logprob in token.top[:top]]}
        for token in tokens
    ]


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.vocabulary.token_bytes[token_id]
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a string that tells it from every other: one that is not UTF-8 is spelled out as OpenAI does."""
    data = tokenizer.vocabulary.token_bytes[token_id]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class LegacyLogprobs:
    """choices[].logprobs of one completions choice; `text_offset` counts the characters before a token over the whole choice."""

    __slots__ = ("_detokenizer", "_length", "_tokenizer", "_top")

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._detokenizer = Detokenizer(tokenizer, skip_special=False)
        self._length = 0

    def prompt(self, ids: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of an echoed prompt: entry 0 is null."""
        return self._block([(i, score) for i, score in zip(ids, scores, strict=True)])

    def output(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._block([(token.token_id, token) for token in tokens])

    def _block(self, entries: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        offsets: list[int] = []
        for token_id, _ in entries:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push((token_id,)))
        return {
            "text_offset": offsets,
            "tokens": [token_name(self._tokenizer, token_id) for token_id, _ in entries],
            "token_logprobs": [None if score is None else finite(score.logprob) for _, score in entries],
            "top_logprobs": [None if score is None else self._alternatives(score) for _, score in entries],
        }

    def _alternatives(self, score: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and, whenever any are asked for, the drawn one."""
        if self._top == 0:
            return {}
        pairs = [*score.top[: self._top], (score.token_id, score.logprob)]
        return {token_name(self._tokenizer, token_id): finite(logprob) for token_id, logprob in pairs}


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Two blocks of LegacyLogprobs, one after the other."""
    return second if first is None else {key: first[key] + second[key] for key in second}
