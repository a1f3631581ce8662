"""`rantang chat`: a conversation in the terminal with any server that speaks OpenAI's chat API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from cluster import stages

HISTORY_MAX = 200  # messages kept; the oldest leave first, the system prompt stays
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 600.0  # between two chunks: a long prompt may take minutes before its first token
EXIT_OK = 0
EXIT_FAILED = 1
HELP = "/exit or Ctrl-D leaves, /clear forgets the conversation, Ctrl-C stops an answer"

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Options:
    url: str
    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    api_key: str | None = None


class ChatError(Exception):
    """The server did not answer as it should; the message is one line."""


class Conversation:
    """Keeps the history and streams one answer at a time."""

    def __init__(self, client: httpx.Client, options: Options, model: str) -> None:
        self._client = client
        self._options = options
        self._model = model
        self._messages: Messages = []
        self.clear()

    @property
    def messages(self) -> Messages:
        return list(self._messages)

    def clear(self) -> None:
        self._messages = [{"role": "system", "content": self._options.system}] if self._options.system else []

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer. Closing the iterator early stops the server's work; what came stays in the history. Raises ChatError."""
        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for piece in self._stream():
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()  # an unanswered question would be asked twice
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        first = 1 if self._options.system else 0
        while len(self._messages) - first > HISTORY_MAX:
            del self._messages[first]

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {"model": self._model, "messages": self._messages, "stream": True}
        if self._options.temperature is not None:
            body["temperature"] = self._options.temperature
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_reason(response))
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise ChatError(f"{self._options.url}: {error or type(error).__name__}") from None


def run(options: Options, message: str | None) -> int:
    """One question if `message` is given, else a dialogue. Returns the exit status."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=base_url(options.url), headers=headers, timeout=timeout) as client:
        try:
            conversation = Conversation(client, options, options.model or _first_model(client, options.url))
            if message is not None:
                return _once(conversation, message)
            return _dialogue(conversation)
        except ChatError as error:
            stages.error(str(error))
            return EXIT_FAILED


def base_url(url: str) -> str:
    """…/v1/ with or without the /v1, the scheme or the slash given."""
    url = url if "://" in url else f"http://{url}"
    url = url.rstrip("/")
    return (url if url.endswith("/v1") else f"{url}/v1") + "/"


def _once(conversation: Conversation, message: str) -> int:
    for piece in conversation.ask(message):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return EXIT_OK


def _dialogue(conversation: Conversation) -> int:
    console = Console(highlight=False)
    console.print(Text(HELP, style="dim"))
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except EOFError:
            console.print()
            return EXIT_OK
        except KeyboardInterrupt:
            console.print()
            continue
        if text == "/exit":
            return EXIT_OK
        if text == "/clear":
            conversation.clear()
        elif text.startswith("/"):
            console.print(Text(HELP, style="dim"))
        elif text:
            _answer(console, conversation, text)


def _answer(console: Console, conversation: Conversation, text: str) -> None:
    pieces = conversation.ask(text)
    try:
        for piece in pieces:
            console.print(Text(piece), end="", soft_wrap=True)
        console.print()
    except KeyboardInterrupt:
        console.print(Text(" (stopped)", style="dim"))
    except ChatError as error:
        console.print(Text(str(error), style="red"))
    finally:
        pieces.close()  # type: ignore[attr-defined]  # a generator: closes the connection, so that the server stops too


def _first_model(client: httpx.Client, url: str) -> str:
    try:
        response = client.get("models")
    except httpx.HTTPError as error:
        raise ChatError(f"no server at {url}: {error or type(error).__name__}") from None
    if response.status_code != 200:
        raise ChatError(_reason(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError(f"{url} does not list its models as OpenAI's API does; name one with --model") from None


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Contents of a stream of server-sent events up to [DONE]. Raises ChatError for an error event or a stream cut off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ChatError("the server sent something that is not JSON") from None
        if "error" in event:
            raise ChatError(_message(event) or data)
        for choice in event.get("choices", ()):
            content = choice.get("delta", {}).get("content")
            if content:
                yield content
    raise ChatError("the server ended the stream before the answer was complete")


def _reason(response: httpx.Response) -> str:
    try:
        said = _message(response.json())
    except ValueError:
        said = ""
    retry = response.headers.get("retry-after")
    return f"status {response.status_code}: {said or response.reason_phrase}" + (f" (try again in {retry} s)" if retry else "")


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
