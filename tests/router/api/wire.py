"""Reading answers as a client does, and talking ASGI by hand where a client's manners matter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from tests.router.smollm2 import smollm2

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def ids(text: str) -> tuple[int, ...]:
    return smollm2().tokenizer.encode(text, parse_special=True)


def refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def strict_json(text: str | bytes) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE] and nothing after it."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], "a stream must end explicitly"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [strict_json(block.removeprefix("data: ")) for block in blocks[:-2]]


@dataclass(slots=True)
class Streamed:
    """One choice as its chunks say."""

    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    roles: int = 0
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def choices_of(events: list[dict[str, Any]]) -> dict[int, Streamed]:
    found: dict[int, Streamed] = {}
    for event in events:
        for choice in event.get("choices", []):
            streamed = found.setdefault(choice["index"], Streamed())
            assert not streamed.finishes, "a chunk after the finish chunk"
            delta = choice.get("delta", {})
            streamed.roles += "role" in delta
            text = choice.get("text", delta.get("content"))
            if text:
                streamed.texts.append(text)
            if choice.get("finish_reason"):
                streamed.finishes.append(choice["finish_reason"])
            if choice.get("logprobs"):
                streamed.logprobs.append(choice["logprobs"])
            streamed.token_ids += choice.get("token_ids", [])
    return found


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    defaults: dict[str, Any] = {"model": "smollm2"} | ({"messages": HI} if path == CHAT else {"prompt": "Hi"})
    return await client.post(path, json=defaults | fields)


async def stream(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await post(client, path, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something that another task does."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, which must have OpenAI's shape."""
    assert len(response.content) <= 16 * 1024
    error = strict_json(response.content)["error"]
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert {"param", "code"} <= error.keys()
    return error


@dataclass(slots=True)
class RawCall:
    """One ASGI call: `leave()` is the client's disconnect; `block` stops its reading."""

    body: bytes
    path: str = CHAT
    method: str = "POST"
    chunks: list[bytes] | None = None  # the body in these pieces
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [(b"content-type", b"application/json")])
    sent: list[Message] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    on_send: Callable[[Message], None] | None = None
    lingering: bool = False  # the server lets others run before it returns from send

    def __post_init__(self) -> None:
        self.reading.set()

    async def run(self, app: ASGIApp) -> None:
        scope = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": self.headers,
            "http_version": "1.1",
            "scheme": "http",
            "client": ("client", 1),
            "server": ("router", 2),
        }
        pieces = [self.body] if self.chunks is None else self.chunks
        rest = [{"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1} for i, piece in enumerate(pieces)]

        async def receive() -> Message:
            if rest:
                return rest.pop(0)
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            await self.reading.wait()
            if self.on_send is not None:
                self.on_send(message)
            self.sent.append(message)
            for _ in range(5 * self.lingering):
                await asyncio.sleep(0)

        await app(scope, receive, send)

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.sent if message["type"] == "http.response.start"), None)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def complete(self) -> bool:
        return bool(self.sent) and self.sent[-1]["type"] == "http.response.body" and not self.sent[-1].get("more_body", False)
