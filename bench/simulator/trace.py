"""Request traces: when, how long the prompt and the answer, which prefix. Data of others is read from a path, never shipped.

Mooncake's jsonl names the prefix by ids of 512-token blocks (the same id means the same blocks before it, too), or of as many
tokens as a line says in `block_tokens`; Azure's csv has lengths only. Arrivals in coarse buckets are spread as `bench.traces` does.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from bench.traces import BLOCK_TOKENS, azure_time, spread

_KEY_BYTES = 16


class TraceError(ValueError):
    """The file is not a trace that we know; says where."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...] = ()  # of its full blocks
    group: str = ""
    prompt_ids: tuple[int, ...] = ()  # empty: nobody will look at them


def read_trace(path: Path, *, speed: float = 1.0, limit: int | None = None, block_tokens: int = BLOCK_TOKENS) -> tuple[TraceRequest, ...]:
    """In order of arrival, the first at 0, `speed` times as fast as recorded; keys of blocks of `block_tokens`.

    Raises TraceError.
    """
    if speed <= 0:
        raise TraceError("speed must be above 0")
    requests = list(_azure(path, block_tokens) if path.suffix == ".csv" else _mooncake(path, block_tokens))
    if not requests:
        raise TraceError(f"{path.name}: no requests")
    requests.sort(key=lambda one: one.arrival_s)
    first_s = requests[0].arrival_s
    return tuple(replace(one, arrival_s=(one.arrival_s - first_s) / speed) for one in requests[:limit])


def _mooncake(path: Path, block_tokens: int) -> Iterator[TraceRequest]:
    rows: list[tuple[float, TraceRequest]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = int(row["input_length"])
            ids = _block_ids([int(one) for one in row.get("hash_ids", [])], int(row.get("block_tokens", BLOCK_TOKENS)), block_tokens)
            keys = tuple(one.to_bytes(_KEY_BYTES, "big") for one in ids[: prompt // block_tokens])
            one = TraceRequest(0.0, prompt, int(row["output_length"]), keys, str(row.get("group", "")))
            stamp = float(row["timestamp"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from None
        if one.prompt_tokens < 1 or one.output_tokens < 1:
            raise TraceError(f"{path.name}, line {number}: a request has at least one token in and one out")
        rows.append((stamp, one))
    times_ms = spread([stamp for stamp, _ in rows])
    for (_, one), time_ms in zip(rows, times_ms, strict=True):
        yield replace(one, arrival_s=time_ms / 1000.0)


def _block_ids(ids: Sequence[int], held_tokens: int, wanted_tokens: int) -> Sequence[int]:
    """Ids of blocks of another size: a chained id names all before it, so the last of several stands for them."""
    if held_tokens < 1:
        raise ValueError("a block has at least one token")
    if held_tokens % wanted_tokens == 0:
        parts = held_tokens // wanted_tokens
        return [one * parts + part for one in ids for part in range(parts)]
    if wanted_tokens % held_tokens == 0:
        step = wanted_tokens // held_tokens
        return ids[step - 1 :: step]
    raise ValueError(f"blocks of {held_tokens} tokens cannot be read as the profile's of {wanted_tokens}")


def _azure(path: Path, block_tokens: int) -> Iterator[TraceRequest]:
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                arrival_s = azure_time(row["TIMESTAMP"]).timestamp()
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"{path.name}, line {number}: {error!r}") from None
            yield TraceRequest(arrival_s, max(1, prompt), max(1, output), own_keys(number, prompt, block_tokens))


def synthetic(count: int, *, prompt_tokens: int, output_tokens: int, rate_per_s: float, seed: int) -> tuple[TraceRequest, ...]:
    """Poisson arrivals of one shape, no prefixes."""
    random = Random(seed)
    now = 0.0
    requests: list[TraceRequest] = []
    for _ in range(count):
        now += random.expovariate(rate_per_s)
        requests.append(TraceRequest(now, prompt_tokens, output_tokens, own_keys(len(requests), prompt_tokens)))
    return tuple(requests)


def own_keys(number: int, prompt_tokens: int, block_tokens: int = BLOCK_TOKENS) -> tuple[bytes, ...]:
    """Blocks that no other request shares."""
    return tuple(((number + 1) << 64 | block).to_bytes(_KEY_BYTES, "big") for block in range(prompt_tokens // block_tokens))
