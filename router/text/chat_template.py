"""Messages to prompt text by the model's own template, in a sandbox, with bounds on time and size.

Strings that came from the client must never become special tokens. They are *guarded* before rendering: wherever a
special token's text stands in one, or could be completed across its ends, a guard character that occurs nowhere in the
input is put in. Tokenizer.encode_guarded reads special tokens only where no guard interrupts them, and takes the guards
out. Templates may trim, split and join as they like, and a harmless text renders as if there were no guards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.tokenizer import Tokenizer

OUTPUT_BYTES_MAX = 16 * 1024 * 1024
RENDER_SECONDS_MAX = 1.0
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
    | {"tokenize", "strftime_now", "chat_template"}
)
_GUARDS = range(0xF0000, 0xFFFFE)  # private use: characters without a meaning that a template could look for


class TemplateError(ValueError):
    """These messages cannot be rendered: the template refuses them, or a bound was reached."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text with guards in it; see Tokenizer.encode_guarded."""

    text: str
    guard: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given. `messages` are in OpenAI's shape: contents are strings, roles are checked."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends with the last message's content, open
    variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs


class ChatTemplate:
    """Immutable and free of per-call state: any number of threads may render."""

    __slots__ = ("_clock", "_constants", "_template")

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TemplateError for a template that does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from error
        self._constants = {"bos_token": bos_token, "eos_token": eos_token}
        self._clock = clock

    def render(self, conversation: Conversation, tokenizer: Tokenizer) -> Rendered:
        """Raises TemplateError when the template refuses, or after RENDER_SECONDS_MAX or OUTPUT_BYTES_MAX."""
        given = (list(conversation.messages), dict(conversation.variables))
        guard, end = _unused_characters(given)
        guarded = _Guard(tokenizer, guard)
        # Names, which the template looks up, and roles, which it compares, are not the client's words.
        messages = [
            {name: value if name == "role" else _guarded(value, guarded) for name, value in message.items()}
            for message in conversation.messages
        ]
        variables = {name: _guarded(value, guarded) for name, value in conversation.variables.items()}
        if conversation.continue_final_message:
            messages[-1]["content"] += end
        text = self._run(
            {
                **variables,
                **self._constants,
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": conversation.add_generation_prompt,
            }
        )
        if conversation.continue_final_message:
            cut = text.rfind(end)
            if cut < 0:
                raise TemplateError("the model's chat template drops the last message: it cannot be continued")
            text = text[:cut].replace(end, "")
        return Rendered(text, guard)

    def _run(self, variables: dict[str, Any]) -> str:
        deadline = self._clock() + RENDER_SECONDS_MAX
        room = OUTPUT_BYTES_MAX
        pieces: list[str] = []
        try:
            for piece in self._template.generate(variables):
                room -= len(piece) if piece.isascii() else len(piece.encode())
                if room < 0:
                    raise TemplateError(f"the rendered prompt exceeds {OUTPUT_BYTES_MAX} bytes")
                if self._clock() > deadline:
                    raise TemplateError(f"rendering the prompt took longer than {RENDER_SECONDS_MAX:g} s")
                pieces.append(piece)
        except _RefusedByTemplate as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError(f"the model's chat template cannot render these messages ({type(error).__name__})") from error
        return "".join(pieces)


class _RefusedByTemplate(Exception):
    """raise_exception() was called: the message is the template's own."""


def _refuse(message: str) -> None:
    raise _RefusedByTemplate(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class _Guard:
    """Puts the guard character into a client's string where a special token's text is, or could be completed across an end."""

    __slots__ = ("_guard", "_heads", "_pattern", "_rounds", "_tails")

    def __init__(self, tokenizer: Tokenizer, guard: str) -> None:
        self._guard = guard
        self._pattern = tokenizer.special_pattern
        self._heads, self._tails = tokenizer.special_ends
        self._rounds = tokenizer.special_characters_max  # so many special tokens can overlap at one character

    def __call__(self, text: str) -> str:
        guarded, found = self._pattern.subn(self._interrupted, text)
        rounds = 1
        while found and rounds < self._rounds:  # those that overlap with one just interrupted
            guarded, found = self._pattern.subn(self._interrupted, guarded)
            rounds += 1
        if guarded.endswith(self._heads):
            guarded += self._guard
        if guarded.startswith(self._tails):
            guarded = self._guard + guarded
        return guarded

    def _interrupted(self, match: re.Match[str]) -> str:
        special = match.group()
        return special[0] + self._guard + special[1:]


def _guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """A copy of JSON-like `value` with every string guarded, keys too."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {guard(key): _guarded(item, guard) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(item, guard) for item in value]
    return value


def _unused_characters(value: Any) -> tuple[str, str]:
    """Two characters that occur in no string of `value`."""
    used: set[str] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if not item.isascii():
                used.update(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
    free = (chr(code) for code in _GUARDS if chr(code) not in used)
    first, second = next(free, None), next(free, None)
    if first is None or second is None:
        raise TemplateError("the messages use every private character there is")
    return first, second
