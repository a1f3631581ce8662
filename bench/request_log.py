"""The requests of a result, one line each, in a compressed file beside it: what distributions and timelines are drawn from."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bench.record import Outcome, RequestRecord

SUFFIX = ".requests.jsonl.gz"


class RequestRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of run `repeat` of point `point` (both count from 0). Times in ms; latencies from when it was due."""

    point: int
    repeat: int
    due_ms: float  # since the first request of the run was due
    outcome: Outcome
    group: str = ""
    prompt_tokens: int | None = None
    output_tokens: int = 0  # seen by the client
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    send_lag_ms: float | None = None
    retries: int = 0
    accepted: bool = False  # completed within the SLO
    gaps_ms: list[float] = []  # between events that carried tokens
    fault: str = ""  # what went wrong, with what the server said

    @property
    def completed(self) -> bool:
        """Only then its times may be drawn or reasoned from: a wrong, failed or cancelled answer lends no speed."""
        return self.outcome is Outcome.COMPLETED


def row_of(record: RequestRecord, *, point: int, repeat: int, start_s: float, accepted: bool) -> RequestRow:
    return RequestRow(
        point=point,
        repeat=repeat,
        due_ms=round((record.scheduled_s - start_s) * 1e3, 2),
        outcome=record.outcome,
        group=record.group,
        prompt_tokens=record.counts.prompt_tokens,
        output_tokens=record.tokens_seen,
        cached_tokens=record.counts.cached_tokens,
        ttft_ms=_ms(record.ttft_s),
        e2e_ms=_ms(record.e2e_s),
        send_lag_ms=_ms(record.send_lag_s),
        retries=record.retries,
        accepted=accepted,
        gaps_ms=[round(gap * 1e3, 2) for gap in record.gaps_s()],
        fault=record.fault,
    )


def write_rows(rows: Iterable[RequestRow], path: Path) -> None:
    encoder = msgspec.json.Encoder()
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as out:
        for row in rows:
            out.write(encoder.encode(row) + b"\n")


def read_rows(path: Path) -> list[RequestRow]:
    """Raises ValueError naming the file that is missing or broken, and the line where it is one."""
    decoder = msgspec.json.Decoder(RequestRow)
    rows: list[RequestRow] = []
    try:
        with gzip.open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    rows.append(decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise ValueError(f"{path.name}, line {number}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path.name}, the requests of a result, cannot be read: {why}") from error
    return rows


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1e3, 2)
