"""What is asked: timed calls with exact lengths and a known structure of prefixes, the same for the same seed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import msgspec

from bench.prompt_ids import segment_ids


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a prompt. The same key is the same text: two segments of one key agree as far as the shorter goes."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One request. `due_s`: from the start, on the workload's own clock; a `Load` may stretch it."""

    due_s: float
    prompt: tuple[Segment, ...]
    output_tokens: int
    cancel_after_s: float | None = None  # the client hangs up this long after the request was due
    group: str = ""  # e.g. "chat", "long": requests to be looked at together
    new_connection: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)

    def prompt_ids(self, salt: str = "") -> array[int]:
        """The prompt as token ids, from the segments' keys and the salt alone."""
        ids = array("H")
        for segment in self.prompt:
            ids.extend(segment_ids(f"{salt}/{segment.key}", segment.tokens))
        return ids


@dataclass(frozen=True, slots=True)
class Workload:
    """Calls in order of `due_s`."""

    name: str
    seed: int
    description: str
    calls: tuple[TimedCall, ...]
    streams: int | None = None  # the closed loop it is meant for, if it is

    def __post_init__(self) -> None:
        assert all(a.due_s <= b.due_s for a, b in zip(self.calls, self.calls[1:], strict=False)), "calls in order of time"

    def __iter__(self) -> Iterator[TimedCall]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate on its own clock, from the first request to the last; None when all is due at once."""
        span_s = self.calls[-1].due_s - self.calls[0].due_s if self.calls else 0.0
        return (len(self.calls) - 1) / span_s if span_s > 0 else None

    @property
    def facts(self) -> WorkloadFacts:
        return WorkloadFacts(self.name, self.seed, self.description, self.hash(), len(self.calls))

    def hash(self) -> str:
        """Of everything that is asked, and when; not of the load, which stretches times."""
        digest = hashlib.sha256()
        for call in self.calls:
            digest.update(msgspec.json.encode((round(call.due_s * 1e6), asdict(call) | {"due_s": 0})))
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What a result file keeps of a workload."""

    name: str
    seed: int
    description: str
    hash: str
    requests: int
