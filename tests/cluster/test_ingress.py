"""Requests for tokens go past Serve's own handling; everything else, and everything elsewhere, does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster import ingress
from cluster.config import parse
from cluster.drain_gate import Receive, Scope, Send
from cluster.environment import serve_environment


class Named:
    """An app that notes what it is asked."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope.get("path", scope["type"]))


async def _receive() -> dict[str, object]:
    return {"type": "http.disconnect"}


async def _send(message: object) -> None:
    return None


async def ask(app: ingress.Shortcut, path: str, kind: str = "http") -> None:
    await app({"type": kind, "path": path}, _receive, _send)


@pytest.fixture(autouse=True)
def nothing_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "_attached", ingress.Attached())


async def test_requests_for_tokens_take_the_short_way() -> None:
    serve, router = Named(), Named()
    shortcut = ingress.Shortcut(serve)
    await ask(shortcut, "/v1/completions")
    ingress.attach(router)
    for path in ("/v1/completions", "/v1/chat/completions", "/ready", "/-/healthz", "/prefix/v1/completions"):
        await ask(shortcut, path)
    await ask(shortcut, "/v1/completions", kind="websocket")
    assert router.paths == ["/v1/completions", "/v1/chat/completions"]
    assert serve.paths == ["/v1/completions", "/ready", "/-/healthz", "/prefix/v1/completions", "/v1/completions"]


async def test_a_server_on_another_loop_is_not_the_routers() -> None:
    serve, router = Named(), Named()
    ingress.attach(router)
    await asyncio.to_thread(asyncio.run, ask(ingress.Shortcut(serve), "/v1/completions"))
    assert (serve.paths, router.paths) == (["/v1/completions"], [])


async def test_an_answer_that_passed_serve_names_its_request_once() -> None:
    """The router's own id comes first; without one, Serve's is kept."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        twice = [(b"x-request-id", b"one"), (b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"X-Request-Id", b"one")]
        await send({"type": "http.response.start", "status": 200, "headers": twice if scope["path"] == "/ready" else twice[3:]})
        await send({"type": "http.response.body", "body": b"text"})

    async def answer(path: str) -> list[Any]:
        sent: list[Any] = []

        async def keep(message: Any) -> None:
            sent.append(message)

        await ingress.Shortcut(serve)({"type": "http", "path": path}, _receive, keep)
        return sent

    start, body = await answer("/ready")
    assert start["headers"] == [(b"x-request-id", b"one"), (b"set-cookie", b"a"), (b"set-cookie", b"b")]
    assert body == {"type": "http.response.body", "body": b"text"}
    assert (await answer("/-/healthz"))[0]["headers"] == [(b"X-Request-Id", b"one")]


def test_serve_is_given_it_as_a_middleware(tmp_path: Path) -> None:
    variables = serve_environment(parse({}), haproxy=None, scratch=tmp_path)
    module, _, name = variables["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")
    assert module == ingress.__name__
    assert [one.cls for one in getattr(ingress, name)()] == [ingress.Shortcut]
