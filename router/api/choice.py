"""One choice of an answer: tokens in, text out, until it has finished. The same object serves streamed and whole answers."""

from __future__ import annotations

import msgspec

from replica.contract.messages import FinishReason, TokenLogprobs
from router.ports import Delta
from router.text.detokenizer import Detokenizer
from router.text.json_texts import JsonTexts
from router.text.stop import StopMatcher, StopStrings
from router.text.tokenizer import Tokenizer

_FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChoiceOptions(msgspec.Struct, frozen=True, gc=False):
    """What the client asked for, the same for all choices of a request."""

    tokenizer: Tokenizer
    stops: StopStrings | None = None
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # the client's own: named in the answer when one ends it
    nothing_wanted: bool = False  # max_tokens 0: the engine's token is dropped


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one Delta brought: the text that may be sent now, and the tokens behind what was accepted."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: str | None = None  # "stop" or "length": nothing follows
    stop_reason: str | int | None = None  # the client's stop string or stop id that ended it


class Choice:
    """Counts every token accepted, the end token and the one that completes a stop string included."""

    __slots__ = ("_detokenizer", "_matcher", "_options", "completion_tokens", "finished")

    def __init__(self, options: ChoiceOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(options.tokenizer, skip_special=options.skip_special)
        self._matcher = StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        self.completion_tokens = 0
        self.finished = False

    @property
    def texts(self) -> JsonTexts | None:
        """Where the next token, unless it is the last, reads as it does alone, and so do those after it; None: `push` decides."""
        options = self._options
        if self.finished or self._matcher is not None or self._detokenizer.holds or options.nothing_wanted:
            return None
        return options.tokenizer.json_texts(skip_special=options.skip_special)

    def push(self, delta: Delta) -> Piece:
        """`delta.finish`, if any, is STOP or LENGTH. Not called again once `finished`."""
        assert not self.finished, "a Delta after the end of its choice"
        if self._options.nothing_wanted:
            self.finished = True
            return Piece("", (), (), "length")
        hidden_last = delta.stop_id is not None and not self._options.include_stop
        if self._matcher is not None:
            return self._push_matching(delta, self._matcher, hidden_last)
        ids = delta.token_ids
        self.completion_tokens += len(ids)
        text = self._detokenizer.push(ids[:-1] if hidden_last else ids)
        if delta.finish is None:
            return Piece(text, ids, delta.logprobs)
        self.finished = True
        return Piece(text + self._detokenizer.flush(), ids, delta.logprobs, _FINISH_NAMES[delta.finish], self._stop_reason(delta))

    def _push_matching(self, delta: Delta, matcher: StopMatcher, hidden_last: bool) -> Piece:
        """Token by token: what follows the token that completes a stop string was never accepted."""
        texts: list[str] = []
        shown = len(delta.token_ids) - hidden_last
        for position, token_id in enumerate(delta.token_ids):
            self.completion_tokens += 1
            text = self._detokenizer.push((token_id,)) if position < shown else ""
            if self.completion_tokens <= self._options.min_tokens:
                texts.append(text)
                continue
            checked = matcher.push(text)
            texts.append(checked.text)
            if checked.stop is not None:
                return self._stopped(texts, delta, position + 1, checked.stop)
        if delta.finish is None:
            return Piece("".join(texts), delta.token_ids, delta.logprobs)
        checked = matcher.push(self._detokenizer.flush())
        texts.append(checked.text)
        if checked.stop is not None:
            return self._stopped(texts, delta, len(delta.token_ids), checked.stop)
        texts.append(matcher.flush())
        self.finished = True
        return Piece("".join(texts), delta.token_ids, delta.logprobs, _FINISH_NAMES[delta.finish], self._stop_reason(delta))

    def _stopped(self, texts: list[str], delta: Delta, accepted: int, stop: str) -> Piece:
        self.finished = True
        return Piece("".join(texts), delta.token_ids[:accepted], delta.logprobs[:accepted], "stop", stop)

    def _stop_reason(self, delta: Delta) -> int | None:
        return delta.stop_id if delta.stop_id in self._options.stop_token_ids else None
