"""What the load client knows of one request once it is over: times on the client's clock, counts, and every fault it saw."""

from __future__ import annotations

import enum
import math
from array import array
from dataclasses import dataclass, field

from bench.refusal_reason import reason_of


class Outcome(enum.StrEnum):
    COMPLETED = "completed"  # a 2xx answer in which nothing was wrong
    SHED = "shed"  # 429
    ERROR = "error"  # another status, a broken connection, an error event
    WRONG = "wrong"  # a 2xx answer that contradicts itself or the request; `problems` says how
    TIMEOUT = "timeout"  # the client gave up
    CANCELLED = "cancelled"  # the client hung up on schedule


@dataclass(slots=True)
class Counts:
    """What the server's usage says. None: it does not say. `text_tokens`: what a prompt sent as text was meant to have."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    text_tokens: int | None = None


@dataclass(slots=True)
class Refusal:
    """What came with an answer that is not 2xx, or with an error event."""

    retry_after_s: float | None = None
    retry_after_ms: float | None = None
    body: bytes = b""  # at most the first 16 KiB

    @property
    def reason(self) -> str:
        """What the body says, in one short line; empty when there was none."""
        return reason_of(self.body)

    @property
    def wait_s(self) -> float | None:
        """When to come again, by the finer of the two headers; None when neither says a time."""
        waits = [self.retry_after_ms / 1e3 if self.retry_after_ms is not None else None, self.retry_after_s]
        return next((wait for wait in waits if wait is not None and math.isfinite(wait)), None)


@dataclass(slots=True)
class Answer:
    """The content, by choice. Texts, ids and raw logprobs are kept on request only."""

    id: str = ""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # when the server sends ids
    logprobs: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of `time.perf_counter`; None: it did not come to that.

    Latencies count from `scheduled_s`, the moment the load asked for the request, never from when the client got round
    to sending it: a stalled server must not hide the requests that would have been sent meanwhile.
    """

    scheduled_s: float
    sent_s: float | None = None
    first_byte_s: float | None = None
    end_s: float | None = None
    chunk_times_s: array[float] = field(default_factory=lambda: array("d"))  # one per event that carried tokens
    chunk_tokens: array[int] = field(default_factory=lambda: array("I"))  # tokens in that event (1 when the server does not say)
    status: int | None = None
    outcome: Outcome = Outcome.ERROR
    problems: list[str] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    refusal: Refusal = field(default_factory=Refusal)
    answer: Answer = field(default_factory=Answer)
    group: str = ""
    retries: int = 0  # times it was sent again after a refusal
    resends: int = 0  # times an idle connection proved to be closed before the request was seen

    @property
    def faults(self) -> list[str]:
        """What went wrong, by kind; nothing where the answer was right, or the client hung up on schedule."""
        if self.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
            return []
        late = ["timeout"] if self.outcome is Outcome.TIMEOUT else []
        return [*late, *([f"status {self.status}"] if self.refused else []), *self.problems]

    @property
    def refused(self) -> bool:
        return self.status is not None and self.status >= 300

    @property
    def fault(self) -> str:
        """All of it in one short line, with what the server said; empty where nothing went wrong."""
        kinds = "; ".join(self.faults)
        return f"{kinds}: {self.refusal.reason}" if kinds and self.refusal.reason else kinds

    def begin_again(self) -> None:
        """After a refusal: nothing of it is kept but that it was, and when the request was first due."""
        self.retries += 1
        self.first_byte_s = self.end_s = self.status = None
        self.outcome = Outcome.ERROR
        self.problems.clear()
        self.refusal = Refusal()

    @property
    def ttft_s(self) -> float | None:
        """Scheduled start to the first event with a token."""
        return self.chunk_times_s[0] - self.scheduled_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """Scheduled start to the end of the answer."""
        return self.end_s - self.scheduled_s if self.end_s is not None else None

    @property
    def tpot_s(self) -> float | None:
        """(last − first token) / (tokens − 1); None below two tokens."""
        tokens_after_first = sum(self.chunk_tokens[1:])
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / tokens_after_first if tokens_after_first else None

    @property
    def answer_s(self) -> float | None:
        """Scheduled start to the first byte of the answer: for a refusal, how long the client waited to hear it."""
        return self.first_byte_s - self.scheduled_s if self.first_byte_s is not None else None

    @property
    def send_lag_s(self) -> float | None:
        """How late the client itself was."""
        return self.sent_s - self.scheduled_s if self.sent_s is not None else None

    @property
    def tokens_seen(self) -> int:
        return sum(self.chunk_tokens)

    def gaps_s(self) -> list[float]:
        """Times between consecutive events that carried tokens, as the client saw them."""
        times = self.chunk_times_s
        return [times[i] - times[i - 1] for i in range(1, len(times))]
