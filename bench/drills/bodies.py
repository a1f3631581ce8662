"""Drill: raw request bodies, each with the statuses it may get. No 5xx, an error of OpenAI's shape, and the next request works.

A file of bodies has one JSON object a line: `path`, `body_raw` (sent as UTF-8, exactly) or `body_gz_b64` (base64 of gzip),
`expect_status` (a list), optionally `param` and a `case` to name it by. `python -m bench.drills.bodies FILE [URL]`.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from bench import result, stack
from bench.answer import Expectation
from bench.connection import Target
from bench.load_client import Call, LoadClient, json_call
from bench.record import Outcome, RequestRecord
from bench.result import Result

ANSWER_MAX_BYTES = 16 * 1024
SHOWN_MAX = 20
BODY_MAX_BYTES = 64 * 1024 * 1024


class _Line(msgspec.Struct):
    path: str
    expect_status: list[int]
    case: str = ""
    body_raw: str | None = None
    body_gz_b64: str | None = None
    param: str | None = None


class _Error(msgspec.Struct):
    message: str
    type: str = ""
    param: str | None = None
    code: str | int | None = None


class _Answer(msgspec.Struct):
    error: _Error


@dataclass(frozen=True, slots=True)
class Body:
    name: str
    path: str
    raw: bytes
    statuses: tuple[int, ...]
    param: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """What was wrong with the answer to one body."""

    body: str
    text: str


def load(path: Path) -> list[Body]:
    """Raises ValueError naming the line that is not a body."""
    bodies: list[Body] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            decoded = msgspec.json.decode(line, type=_Line)
            raw = _unpack(decoded)
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            raise ValueError(f"line {number}: {error}") from error
        name = f"line {number} {decoded.case}".strip()
        bodies.append(Body(name, decoded.path, raw, tuple(decoded.expect_status), decoded.param))
    return bodies


def _unpack(line: _Line) -> bytes:
    if line.body_raw is not None:
        return line.body_raw.encode()
    if line.body_gz_b64 is None:
        raise ValueError("neither body_raw nor body_gz_b64")
    with gzip.GzipFile(fileobj=io.BytesIO(base64.b64decode(line.body_gz_b64))) as file:
        raw = file.read(BODY_MAX_BYTES + 1)
    if len(raw) > BODY_MAX_BYTES:
        raise ValueError(f"unpacks to more than {BODY_MAX_BYTES} bytes")
    return raw


async def run(url: str, bodies: Sequence[Body]) -> list[Fault]:
    client = LoadClient(Target.parse(url), timeout_s=60.0)
    valid = json_call("/v1/completions", {"model": "smollm2", "prompt": "hi", "max_tokens": 1}, Expectation(stream=False))
    faults: list[Fault] = []
    try:
        for body in bodies:
            record = await client.send(Call(body.path, body.raw, Expectation(stream=False, usage=False, choices=None, countable=False)))
            faults += [Fault(body.name, text) for text in judge(body, record)]
            after = await client.send(valid)
            if after.outcome is not Outcome.COMPLETED:
                faults.append(Fault(body.name, f"the next valid request: status {after.status}, {'; '.join(after.problems)}"))
    finally:
        client.close()
    return faults


def judge(body: Body, record: RequestRecord) -> list[str]:
    """What is wrong with this answer."""
    if record.status is None:
        return [f"no answer: {'; '.join(record.problems) or record.outcome}"]
    faults: list[str] = []
    if record.status not in body.statuses:
        faults.append(f"status {record.status}, allowed {', '.join(map(str, body.statuses))}")
    if record.status < 300:
        return faults + ([] if record.outcome is Outcome.COMPLETED else record.problems)
    if len(record.refusal.body) >= ANSWER_MAX_BYTES:
        return [*faults, f"error body of {ANSWER_MAX_BYTES} bytes or more"]
    try:
        error = msgspec.json.decode(record.refusal.body, type=_Answer).error
    except msgspec.MsgspecError as problem:
        return [*faults, f"not an OpenAI error: {problem}"]
    if not error.message:
        faults.append("an error without a message")
    if body.param is not None and error.param != body.param:
        faults.append(f"error.param {error.param!r}, expected {body.param!r}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bodies", type=Path)
    parser.add_argument("url", nargs="?", help="a running server; without it a stack is started and stopped")
    options = parser.parse_args()
    try:
        bodies = load(options.bodies)
        with stack.served(["--replicas", "1"], url=options.url) as url:
            faults = uvloop.run(run(url, bodies))
    except (OSError, ValueError, stack.StackError) as error:
        print(error)
        return 2
    for fault in faults[:SHOWN_MAX]:
        print(f"{fault.body}: {fault.text}")
    if len(faults) > SHOWN_MAX:
        print(f"… and {len(faults) - SHOWN_MAX} more")
    metrics = (result.plain("bodies", float(len(bodies)), "bodies"), result.at_most("faults", float(len(faults)), 0, "faults"))
    details: dict[str, object] = {"faults": [msgspec.to_builtins(fault) for fault in faults]}
    outcome = Result("bodies", {"file": options.bodies.name}, metrics=metrics, details=details)
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
