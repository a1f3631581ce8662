"""Negative controls: with a guard of the answers switched off, the test that stands for it must fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx
import pytest
from msgspec.structs import replace

from router.api import logprobs, submission
from router.api.choice import Choice, Piece
from router.api.submission import Caller
from router.ports import Delta
from tests.router.api import test_answers, test_information
from tests.router.fake_backend import FakeBackend

Test = Callable[[httpx.AsyncClient, FakeBackend], Awaitable[None]]
push = Choice.push


def entries_only_beside_text(self: Choice, delta: Delta) -> Piece:
    piece = push(self, delta)
    return piece if piece.text else replace(piece, logprobs=())


def the_clients_salt_alone(caller: Caller, client_salt: str | None) -> bytes:
    return (client_salt or "").encode()


async def chat(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await test_answers.test_chat_logprobs(client, backend, 5)


async def completion(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await test_answers.test_completion_logprobs(client, backend, 5, 1)


async def tenants(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    async with test_information.keyed_client(backend) as opened:
        await test_information.test_keys_open_the_door_and_keep_tenants_apart((backend, opened))


@pytest.mark.parametrize(
    ("owner", "name", "off", "test"),
    [
        (logprobs, "finite", lambda logprob: logprob, chat),
        (Choice, "push", entries_only_beside_text, chat),
        (Choice, "push", entries_only_beside_text, completion),
        (submission, "cache_salt", the_clients_salt_alone, tenants),
    ],
    ids=["infinity", "held-back-chat", "held-back-completion", "copied-salt"],
)
async def test_without_the_guard_its_test_fails(
    owner: object, name: str, off: object, test: Test, client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, off)
    with pytest.raises(AssertionError):
        await test(client, backend)
