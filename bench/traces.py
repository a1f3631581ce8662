"""Workloads from files: Mooncake's jsonl (times, lengths, ids of chained blocks), Azure's csv (times, lengths), and our own jsonl.

Our own is Mooncake's with optional fields: `block_tokens` (512 unless given), `cancel_after_ms`, `group`; `rantang bench convert`
writes it. A line that cannot be used is named by its number. Mooncake's times are in buckets of 3 s, which are spread; others stay.
"""

from __future__ import annotations

import codecs
import csv
import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from bench.workload import Segment, TimedCall, Workload

BLOCK_TOKENS = 512
BUCKET_MS = 3_000.0  # of Mooncake's timestamps
BUCKET_SLACK_MS = 5.0  # many of them are a few milliseconds early
LINE_BYTES_MAX = 4 * 1024 * 1024
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTH_MAX = 100_000_000  # tokens
_Count = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)]
_Id = Annotated[int, msgspec.Meta(ge=0)]
_Ms = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


@dataclass(frozen=True, slots=True)
class Fit:
    """How a trace of large models is made to fit a small one: lengths times `length_scale`, prompt and output within `context_tokens`."""

    length_scale: float = 1.0
    context_tokens: int = 8_192

    def __post_init__(self) -> None:
        if not 0 < self.length_scale < float("inf"):
            raise ValueError(f"the scale of lengths must be positive, got {self.length_scale}")
        if self.context_tokens < 2:
            raise ValueError(f"a context has at least 2 tokens, got {self.context_tokens}")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of a jsonl trace. Tokens beyond the blocks are its own; blocks beyond its length do not count."""

    timestamp: _Ms
    input_length: _Positive
    output_length: _Count
    hash_ids: list[_Id] = []  # equal ids: equal text, up to and with this block
    block_tokens: _Positive = BLOCK_TOKENS
    cancel_after_ms: _Ms | None = None
    group: str = ""


def read(path: Path, requests: int | None, fit: Fit, seed: int) -> Workload:
    """The first `requests` of the file (all: None). Raises ValueError naming file and line."""
    rows = iter(_azure(path) if path.suffix == ".csv" else _jsonl(path))
    lines = list(islice(rows, requests))
    if not lines:
        raise ValueError(f"{path.name} holds no request")
    lines.sort(key=lambda line: line.timestamp)
    recorded = [line.timestamp for line in lines]
    times_ms = _spread_first(recorded, rows) if path.suffix != ".csv" and all(map(_is_mooncakes, lines)) else recorded
    cut = 0
    calls = []
    for i, line in enumerate(lines):
        call, was_cut = _call(line, i, (times_ms[i] - times_ms[0]) / 1e3, fit, f"{path.stem}/{seed}")
        calls.append(call)
        cut += was_cut
    description = f"trace {path.name}, lengths × {fit.length_scale:g}, {cut} of {len(calls)} cut to {fit.context_tokens} tokens"
    if times_ms != recorded:
        description += f", arrivals spread inside buckets of {BUCKET_MS / 1e3:g} s"
    elif len(calls) > 1 and times_ms[0] == times_ms[-1]:
        description += ", all due at once"
    return Workload(path.stem, seed, description, tuple(calls))


def spread(recorded_ms: Sequence[float]) -> list[float]:
    """Requests of one bucket follow each other evenly until the next; times that are in no buckets, or all in one, stay."""
    buckets = [BUCKET_MS * round(time_ms / BUCKET_MS) for time_ms in recorded_ms]
    if len(set(buckets)) < 2 or any(abs(time_ms - bucket) > BUCKET_SLACK_MS for time_ms, bucket in zip(recorded_ms, buckets, strict=True)):
        return list(recorded_ms)
    together, place = Counter(buckets), Counter[float]()
    times_ms = []
    for bucket in buckets:
        times_ms.append(bucket + BUCKET_MS * place[bucket] / together[bucket])
        place[bucket] += 1
    return times_ms


def _is_mooncakes(line: Line) -> bool:
    """Whether it has nothing of our own format, whose times mean what they say."""
    return line.block_tokens == BLOCK_TOKENS and line.cancel_after_ms is None and not line.group


def _spread_first(recorded_ms: list[float], rest: Iterator[Line]) -> list[float]:
    """The first requests of a trace, spread as the whole of it is: of one bucket alone it does not show that there are any."""
    if recorded_ms[-1] > recorded_ms[0] + BUCKET_MS / 2:
        return spread(recorded_ms)
    later = next((line.timestamp for line in rest if line.timestamp > recorded_ms[0] + BUCKET_MS / 2), None)
    return spread([*recorded_ms, *([] if later is None else [later])])[: len(recorded_ms)]


def _call(line: Line, index: int, due_s: float, fit: Fit, key: str) -> tuple[TimedCall, bool]:
    """The call, and whether it had to be cut to the context."""
    output_tokens = max(1, round(line.output_length * fit.length_scale))
    wanted = max(1, round(line.input_length * fit.length_scale))
    output_tokens = min(output_tokens, fit.context_tokens - 1)
    prompt_tokens = min(wanted, fit.context_tokens - output_tokens)
    block_tokens = max(1, round(line.block_tokens * fit.length_scale))
    segments: list[Segment] = []
    left = prompt_tokens
    for block in line.hash_ids:
        if left <= 0:
            break
        segments.append(Segment(f"{key}/{block}", min(block_tokens, left)))
        left -= block_tokens
    if left > 0:
        segments.append(Segment(f"{key}/own/{index}", left))
    cancel_after_s = None if line.cancel_after_ms is None else line.cancel_after_ms / 1e3
    return TimedCall(due_s, tuple(segments), output_tokens, cancel_after_s, line.group), prompt_tokens < wanted


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that hold something, with their numbers. Raises ValueError for a line without end."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if len(line) > LINE_BYTES_MAX:
                    raise ValueError(f"{path.name}, line {number}: longer than {LINE_BYTES_MAX} bytes")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error


def _jsonl(path: Path) -> Iterable[Line]:
    decoder = msgspec.json.Decoder(Line)
    for number, line in numbered_lines(path):
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error


def azure_time(text: str) -> datetime.datetime:
    """UTC where no zone is named. Raises ValueError."""
    at = datetime.datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)


def _azure(path: Path) -> Iterable[Line]:
    first: datetime.datetime | None = None
    columns: list[int] = []
    for number, raw in numbered_lines(path):
        cells = next(csv.reader([raw.decode("utf-8", "replace").lstrip("\ufeff").strip()]))
        if not columns:
            missing = [name for name in AZURE_FIELDS if name not in cells]
            if missing:
                raise ValueError(f"{path.name}, line {number}: no column {', '.join(missing)}")
            columns = [cells.index(name) for name in AZURE_FIELDS]
            continue
        if len(cells) <= max(columns):
            raise ValueError(f"{path.name}, line {number}: fewer columns than the first line")
        try:
            time, prompt, output = (cells[column] for column in columns)
            at = azure_time(time)
            first = first or at
            line = {"timestamp": (at - first).total_seconds() * 1e3, "input_length": int(prompt), "output_length": int(output)}
            yield msgspec.convert(line, Line)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
