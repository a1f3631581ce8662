"""Request traces: when, how long the prompt and the answer, which prefix. Data of others is read from a path, never shipped.

Mooncake's jsonl names the prefix by ids of 512-token blocks (the same id means the same blocks before it, too); Azure's
csv has lengths only. Arrivals that a trace holds in coarse buckets are spread evenly inside each bucket.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random

BLOCK_TOKENS = 512
_BUCKET_MS = 3_000.0  # of Mooncake's timestamps
_KEY_BYTES = 16


class TraceError(ValueError):
    """The file is not a trace that we know; says where."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...] = ()  # of its full blocks of BLOCK_TOKENS
    group: str = ""
    prompt_ids: tuple[int, ...] = ()  # empty: nobody will look at them


def read_trace(path: Path, *, speed: float = 1.0, limit: int | None = None) -> tuple[TraceRequest, ...]:
    """In order of arrival, the first at 0, `speed` times as fast as recorded."""
    if speed <= 0:
        raise TraceError("speed must be above 0")
    requests = list(_azure(path) if path.suffix == ".csv" else _mooncake(path))
    if not requests:
        raise TraceError(f"{path.name}: no requests")
    requests.sort(key=lambda one: one.arrival_s)
    first_s = requests[0].arrival_s
    return tuple(replace(one, arrival_s=(one.arrival_s - first_s) / speed) for one in requests[:limit])


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    rows: list[tuple[float, TraceRequest]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = int(row["input_length"])
            keys = tuple(int(one).to_bytes(_KEY_BYTES, "big") for one in row["hash_ids"][: prompt // BLOCK_TOKENS])
            one = TraceRequest(0.0, prompt, int(row["output_length"]), keys, str(row.get("group", "")))
            stamp = float(row["timestamp"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from None
        if one.prompt_tokens < 1 or one.output_tokens < 1:
            raise TraceError(f"{path.name}, line {number}: a request has at least one token in and one out")
        rows.append((stamp, one))
    return _spread(rows)


def _spread(rows: Sequence[tuple[float, TraceRequest]]) -> Iterator[TraceRequest]:
    """Those of one bucket follow each other evenly until the next bucket."""
    buckets: dict[float, list[TraceRequest]] = {}
    for stamp, one in rows:
        buckets.setdefault(stamp, []).append(one)
    for stamp, together in buckets.items():
        for place, one in enumerate(together):
            yield replace(one, arrival_s=(stamp + _BUCKET_MS * place / len(together)) / 1000.0)


def _azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                arrival_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"{path.name}, line {number}: {error!r}") from None
            yield TraceRequest(arrival_s, max(1, prompt), max(1, output), own_keys(number, prompt))


def synthetic(count: int, *, prompt_tokens: int, output_tokens: int, rate_per_s: float, seed: int) -> tuple[TraceRequest, ...]:
    """Poisson arrivals of one shape, no prefixes."""
    random = Random(seed)
    now = 0.0
    requests: list[TraceRequest] = []
    for _ in range(count):
        now += random.expovariate(rate_per_s)
        requests.append(TraceRequest(now, prompt_tokens, output_tokens, own_keys(len(requests), prompt_tokens)))
    return tuple(requests)


def own_keys(number: int, prompt_tokens: int) -> tuple[bytes, ...]:
    """Blocks that no other request shares."""
    return tuple(((number + 1) << 64 | block).to_bytes(_KEY_BYTES, "big") for block in range(prompt_tokens // BLOCK_TOKENS))
