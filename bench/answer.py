"""Reads one answer as it comes and checks it: token counts, one finish per choice, order, `[DONE]`, usage.

A server that lies must show in the figures as wrong answers, not as speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bench.record import Outcome, RequestRecord

ERROR_BODY_MAX_BYTES = 16 * 1024
EVENT_MAX_BYTES = 16 * 1024 * 1024
PROBLEMS_MAX = 8
LOCATION_MAX = 200  # characters of where an answer moved to
TOKENS_TOO_MANY = 64  # beyond what was asked for: the answer is not waited for any longer


_ABSENT = msgspec.Raw(b"")  # msgspec decodes no union with Raw: absent and null are told by content


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Text(msgspec.Struct, gc=False):
    """A chat delta or message."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: Text | None = None
    message: Text | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: msgspec.Raw = _ABSENT


class Event(msgspec.Struct, gc=False):
    """A chunk of a stream, or a whole answer: what both kinds of endpoint have in common."""

    id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = _ABSENT


_decoder = msgspec.json.Decoder(Event)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the request implies about its answer. None: not known, not checked."""

    stream: bool = True
    choices: int | None = 1
    prompt_tokens: int | None = None  # exact, when the prompt is given as ids
    text_tokens: int | None = None  # meant, when it is given as text; the server's tokenizer may see it otherwise
    completion_tokens: int | None = None  # exact in all choices together, when `ignore_eos` holds
    usage: bool = True  # the answer must carry usage
    countable: bool = True  # the text is output alone; False with `echo`, whose text is no token of the answer
    keep: bool = False  # keep texts, ids and logprobs in the record


class AnswerReader:
    """The sink of one request. `done` is called once, when the record is complete; `closing` at [DONE], when only the end may come."""

    def __init__(
        self, record: RequestRecord, expect: Expectation, done: Callable[[], None], closing: Callable[[], None] = lambda: None
    ) -> None:
        self.record = record
        self._expect = expect
        record.counts.text_tokens = expect.text_tokens
        self._done = done
        self._closing = closing
        self._buffer = bytearray()
        self._received_bytes = 0
        self._stream = False
        self._saw_done = False
        self._saw_ids = False
        self._over = False
        self._tokens = 0

    @property
    def over(self) -> bool:
        return self._over

    # --- Sink ---

    def begun(self, status: int, headers: dict[str, str], now_s: float) -> None:
        record = self.record
        record.first_byte_s = now_s
        record.status = status
        record.refusal.retry_after_s = _number(headers.get("retry-after"))
        record.refusal.retry_after_ms = _number(headers.get("retry-after-ms"))
        if 300 <= status < 400:
            self._problem(f"redirected to {headers.get('location', 'nowhere')[:LOCATION_MAX]}, which is not followed: give that URL")
        self._stream = status < 300 and self._expect.stream
        if self._stream and not headers.get("content-type", "").startswith("text/event-stream"):
            self._stream = False
            self._problem("not an event stream")

    def received(self, data: bytes, now_s: float) -> None:
        if self._over:
            return
        self._buffer += data
        if not self._stream:
            self._bound_whole(len(data), now_s)
            return
        if b"\r" in self._buffer:
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
        while (end := self._buffer.find(b"\n\n")) >= 0 and not self._over:
            event = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            self._event(event, now_s)
        if len(self._buffer) > EVENT_MAX_BYTES:
            self._problem("event too large")
            self.finish(Outcome.WRONG, now_s)

    def ended(self, now_s: float) -> None:
        if self._over:
            return
        record = self.record
        status = record.status or 0
        if status >= 300:
            record.refusal.body = bytes(self._buffer)
            self.finish(Outcome.SHED if status == 429 else Outcome.ERROR, now_s)
            return
        if self._stream:
            if self._buffer.strip():
                self._problem("unfinished event")
            if not self._saw_done:
                self._problem("no [DONE]")
        else:
            self._chunk(bytes(self._buffer), now_s)
        self._check_counts()
        if record.refusal.body:
            self.finish(Outcome.ERROR, now_s)
        else:
            self.finish(Outcome.WRONG if record.problems else Outcome.COMPLETED, now_s)

    def broken(self, reason: str, now_s: float) -> None:
        self._problem(reason)
        self.finish(Outcome.ERROR, now_s)

    def overdue(self, now_s: float) -> bool:
        """The client waits no longer. True when nothing but the end was missing: the answer is then wrong, and over."""
        if self._saw_done and not self._over:
            self._problem("no end after [DONE]")
            self.finish(Outcome.WRONG, now_s)
        return self._over

    def finish(self, outcome: Outcome, now_s: float) -> None:
        """The one door out; the first to come through it decides."""
        if self._over:
            return
        self._over = True
        self.record.outcome = outcome
        self.record.end_s = now_s
        self._buffer.clear()
        self._done()

    # --- reading ---

    def _bound_whole(self, size: int, now_s: float) -> None:
        """Of an answer that is no stream: a refusal's beginning is kept, and what never ends is not waited for."""
        refused = (self.record.status or 0) >= 300
        kept = ERROR_BODY_MAX_BYTES if refused else EVENT_MAX_BYTES
        del self._buffer[kept:]
        self._received_bytes += size
        if self._received_bytes > EVENT_MAX_BYTES:
            self._problem("answer too large")
            if refused:
                self.record.refusal.body = bytes(self._buffer)
            self.finish(Outcome.ERROR if refused else Outcome.WRONG, now_s)

    def _event(self, event: bytes, now_s: float) -> None:
        if event.startswith(b"data: ") and b"\n" not in event:
            payload = event[6:]
        else:  # comments, event names, several lines of data
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return
            payload = b"\n".join(lines)
        if self._saw_done:
            self._problem("data after [DONE]")
            self.finish(Outcome.WRONG, now_s)
        elif payload == b"[DONE]":
            self._saw_done = True
            self._closing()
        else:
            self._chunk(payload, now_s)

    def _chunk(self, payload: bytes, now_s: float) -> None:
        try:
            event = _decoder.decode(payload)
        except msgspec.MsgspecError:
            self._problem("not JSON of the expected shape")
            return
        record = self.record
        if _present(event.error):
            record.refusal.body = bytes(event.error)[:ERROR_BODY_MAX_BYTES]
            self._problem("error event")
            return
        if not record.answer.id:
            record.answer.id = event.id
        elif event.id != record.answer.id:
            self._problem("id changed")
        tokens = 0
        for choice in event.choices:
            tokens += self._choice(choice)
        if tokens:
            record.chunk_times_s.append(now_s)
            record.chunk_tokens.append(tokens)
            self._tokens += tokens
            wanted = self._expect.completion_tokens
            if wanted is not None and self._tokens > wanted + TOKENS_TOO_MANY:
                self._problem(f"more than {wanted + TOKENS_TOO_MANY} tokens, asked for {wanted}")
                self.finish(Outcome.WRONG, now_s)
        if event.usage is not None:
            self._usage(event.usage)

    def _choice(self, choice: Choice) -> int:
        """Tokens that this event brought for one choice."""
        record, index = self.record, choice.index
        if self._expect.choices is not None and not 0 <= index < self._expect.choices:
            self._problem("unknown choice")
            return 0
        part = choice.delta or choice.message
        text = choice.text if part is None else (part.content or part.reasoning_content)
        if choice.token_ids is not None:
            self._saw_ids = True
            tokens = len(choice.token_ids)
        else:
            tokens = 1 if text else 0
        if index in record.answer.finish_reasons and (tokens or text):
            self._problem("token after finish")
        if choice.finish_reason is not None:
            if index in record.answer.finish_reasons:
                self._problem("second finish")
            record.answer.finish_reasons[index] = choice.finish_reason
        if self._expect.keep:
            self._keep(choice, text or "")
        return tokens

    def _keep(self, choice: Choice, text: str) -> None:
        record, index = self.record, choice.index
        record.answer.texts[index] = record.answer.texts.get(index, "") + text
        if choice.token_ids is not None:
            record.answer.token_ids.setdefault(index, []).extend(choice.token_ids)
        if _present(choice.logprobs):
            record.answer.logprobs.setdefault(index, []).append(bytes(choice.logprobs))

    def _usage(self, usage: Usage) -> None:
        record = self.record
        record.counts.prompt_tokens = usage.prompt_tokens
        record.counts.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.counts.cached_tokens = usage.prompt_tokens_details.cached_tokens

    # --- checking ---

    def _check_counts(self) -> None:
        record, expect = self.record, self._expect
        if record.refusal.body:
            return
        if len(record.answer.finish_reasons) < (expect.choices or 1):
            self._problem("no finish")
        if record.counts.completion_tokens is None or record.counts.prompt_tokens is None:
            if expect.usage:
                self._problem("no usage")
            return
        cached, prompt = record.counts.cached_tokens or 0, record.counts.prompt_tokens
        if not 0 <= cached <= prompt:
            self._problem(f"usage says {cached} cached tokens of {prompt} in the prompt")
        if expect.prompt_tokens is not None and record.counts.prompt_tokens != expect.prompt_tokens:
            self._problem(f"usage says {record.counts.prompt_tokens} prompt tokens, sent {expect.prompt_tokens}")
        said, seen, wanted = record.counts.completion_tokens, self._tokens, expect.completion_tokens
        if wanted is not None and said != wanted:
            self._problem(f"usage says {said} tokens, asked for {wanted}" + (f", {seen} came" if self._saw_ids else ""))
            return
        if not expect.countable:
            return
        textless = 0 if expect.completion_tokens else 1  # an end token alone has no text
        if (self._saw_ids and seen != said) or (not seen and said > textless):
            self._problem(f"usage says {said} tokens, {seen} came")
        elif seen > said:  # without ids an event stands for at least one token
            self._problem(f"usage says {said} tokens, at least {seen} came")

    def _problem(self, text: str) -> None:
        if len(self.record.problems) < PROBLEMS_MAX and text not in self.record.problems:
            self.record.problems.append(text)


def _present(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None
