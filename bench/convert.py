"""Logs of OpenAI-style requests to a trace without text: times, lengths, and which prompts begin alike.

Prompts are cut into blocks, hashed in a chain under a salt that is made for this one conversion and forgotten, and then
numbered in order of appearance: neither text nor anything computed from text alone is left in the file.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.traces import LENGTH_MAX, Line, numbered_lines

BLOCK_TOKENS = 16
IDS = ("request_id", "id")
NUMBER = r"-?(?![0-9]{8}$)[0-9]+(\.[0-9]+)?"  # eight digits alone are a date
LATEST_S = 1e11  # of times since 1970
CHARACTERS_OF_A_TOKEN = 4  # where the log does not say how many tokens a prompt had


@dataclass(frozen=True, slots=True)
class Converted:
    requests: int
    estimated: int  # prompts whose length in tokens the log does not say
    first_s: float  # since 1970
    last_s: float
    sharing: int = 0  # requests whose id another has too; all of them count
    skipped: int = 0  # lines that could not be used

    @property
    def description(self) -> str:
        first, last = (datetime.datetime.fromtimestamp(at_s, datetime.UTC) for at_s in (self.first_s, self.last_s))
        told = [f"{self.requests} request{'s' * (self.requests != 1)} from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC"]
        told += [f"the lengths of {self.estimated} prompts are estimates"] if self.estimated else []
        told += [f"{self.sharing} lines share their id with another, and all are counted"] if self.sharing else []
        told += [f"{self.skipped} line{'s' * (self.skipped != 1)} could not be used and skipped"] if self.skipped else []
        return "; ".join(told)


class _Numbering:
    """Blocks of prompts to numbers. The same number: the same text from the prompt's beginning to this block's end."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._number: dict[bytes, int] = {}

    def of(self, units: Sequence[Any], block: int) -> list[int]:
        """Of the full blocks only: what is left over is the request's own."""
        numbers: list[int] = []
        chain = b""
        for start in range(0, len(units) - block + 1, block):
            digest = hashlib.blake2b(key=self._salt, digest_size=16)
            digest.update(chain)
            digest.update(msgspec.json.encode(units[start : start + block]))
            chain = digest.digest()
            numbers.append(self._number.setdefault(chain, len(self._number)))
        return numbers


def convert(source: Path, target: Path, *, skip_broken: bool = False) -> Converted:
    """Raises ValueError naming the line that cannot be used (the target is then not written; `skip_broken` leaves such lines out
    and counts them), or a target that cannot be written."""
    if source.resolve() == target.resolve():
        raise ValueError("the trace cannot be written over the log")
    numbering = _Numbering()
    lines: list[tuple[float, Line]] = []
    estimated = skipped = 0
    ids: Counter[str] = Counter()
    for number, raw in numbered_lines(source):
        try:
            entry = _flat(msgspec.json.decode(raw, type=dict[str, Any]))
            at_s = _time_s(entry)
            line, guessed = _line(entry, numbering)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            if skip_broken:
                skipped += 1
                continue
            raise ValueError(f"{source.name}, line {number}: {error} (--skip-broken leaves such lines out)") from None
        lines.append((at_s, line))
        estimated += guessed
        name = next((name for name in IDS if isinstance(entry.get(name), (str, int))), None)
        ids.update([] if name is None else [str(entry[name])])
    if not lines:
        raise ValueError(f"{source.name} holds no request")
    lines.sort(key=lambda pair: pair[0])
    first_s = lines[0][0]
    encoded = [msgspec.json.encode(msgspec.structs.replace(line, timestamp=round((at_s - first_s) * 1e3, 1))) for at_s, line in lines]
    try:
        target.write_bytes(b"\n".join(encoded) + b"\n")
    except OSError as error:
        raise ValueError(f"{target}: {error.strerror}") from None
    sharing = sum(count for count in ids.values() if count > 1)
    return Converted(len(lines), estimated, first_s, lines[-1][0], sharing, skipped)


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A log may keep the request and the response apart; the outer fields win."""
    flat: dict[str, Any] = {}
    for part in ("response", "body", "request"):
        if isinstance(entry.get(part), Mapping):
            flat.update(entry[part])
    return flat | dict(entry)


def _line(entry: Mapping[str, Any], numbering: _Numbering) -> tuple[Line, bool]:
    usage = entry.get("usage") if isinstance(entry.get("usage"), Mapping) else {}
    assert isinstance(usage, Mapping)
    output_tokens = _count(_first(entry, usage, "output_tokens", "completion_tokens", "output_length"))
    if output_tokens is None:
        raise ValueError("no output length: `output_tokens`, or `usage.completion_tokens`")
    units, block = _prompt(entry)
    said = _count(_first(entry, usage, "prompt_tokens", "input_tokens", "input_length"))
    guessed = len(units) if block == BLOCK_TOKENS else -(-len(units) // CHARACTERS_OF_A_TOKEN)
    line = Line(0.0, max(1, guessed if said is None else said), output_tokens, numbering.of(units, block), BLOCK_TOKENS)
    return line, said is None and block != BLOCK_TOKENS


def _prompt(entry: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
    """What is cut into blocks, and how many of it make one: token ids, or characters of text."""
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
        return prompt, BLOCK_TOKENS
    if isinstance(prompt, str) and prompt:
        return prompt, BLOCK_TOKENS * CHARACTERS_OF_A_TOKEN
    if isinstance(messages, list) and messages and all(isinstance(message, Mapping) for message in messages):
        text = "".join(f"{_text(message.get('role'))}\n{_text(message.get('content'))}\n" for message in messages)
        return text, BLOCK_TOKENS * CHARACTERS_OF_A_TOKEN
    raise ValueError("no prompt: `messages`, or `prompt` as text or token ids")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def _time_s(entry: Mapping[str, Any]) -> float:
    for name in ("timestamp", "time", "created", "created_at"):
        value = entry.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _seconds(name, value)
        if isinstance(value, str):
            if re.fullmatch(NUMBER, value.strip()):
                return _seconds(name, float(value))
            try:
                at = datetime.datetime.fromisoformat(value)
            except ValueError:
                raise ValueError(f"`{name}` is no time in ISO 8601") from None
            return at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()
    raise ValueError("no time: `timestamp`, a number or ISO 8601")


def _seconds(name: str, value: int | float) -> float:
    """Of a number since 1970 in seconds, milli-, micro- or nanoseconds: from 1973 until 5138 its size says in which."""
    if value < 0:
        raise ValueError(f"`{name}` is negative, and no time since 1970")
    for per_s in (1.0, 1e3, 1e6, 1e9):
        if value <= LATEST_S * per_s:
            return value / per_s
    raise ValueError(f"`{name}` is no time: it lies beyond the year 5138 even in nanoseconds")


def _first(entry: Mapping[str, Any], usage: Mapping[str, Any], *names: str) -> Any:
    return next((where[name] for name in names for where in (usage, entry) if where.get(name) is not None), None)


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LENGTH_MAX:
        raise ValueError(f"a length is a whole number from 0 to {LENGTH_MAX}")
    return value
