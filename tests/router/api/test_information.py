from __future__ import annotations

import re
from dataclasses import replace

import httpx
import pytest

from router.app import build_app
from router.config import RouterConfig
from router.ports import Rejected
from tests.router.api.wire import CHAT, COMPLETIONS, HI, error_of, post
from tests.router.fake_backend import STATUS, FakeBackend
from tests.router.smollm2 import smollm2
from tests.router.text.smollm2_vectors import CHATS


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["smollm2"]
    assert (await client.get("/v1/models/smollm2")).json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 8192
    missing = await client.get("/v1/models/org/other")
    assert missing.status_code == 404 and error_of(missing)["code"] == "model_not_found" and "org/other" in missing.text


async def test_live_and_ready_are_two_answers(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for live, ready in ((True, True), (True, False), (False, True), (False, False)):
        backend.pool = replace(STATUS, live=live, ready=ready, reason="" if ready else "loading the model")
        assert (await client.get("/health")).status_code == (200 if live else 503)
        response = await client.get("/ready")
        assert response.status_code == (200 if ready else 503)
        assert ready or "loading the model" in response.text


async def test_before_the_first_replica(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.pool = replace(STATUS, ready=False, replicas=0, limits=None)
    backend.reject = Rejected(503, "no_replica", "no replica is healthy", 1.0)
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
    for path in (CHAT, COMPLETIONS):
        response = await post(client, path)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"


async def test_routes_and_methods_in_openais_shape(client: httpx.AsyncClient) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("GET", CHAT, 405), ("POST", "/health", 405), ("OPTIONS", CHAT, 405)):
        response = await client.request(method, path)
        assert response.status_code == status
        error_of(response)
    assert (await client.get("/version")).json()["version"]


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"model": "smollm2", "prompt": "abc<|im_end|>def", "return_token_strs": True})).json()
    assert answer == {"count": 3, "max_model_len": 8192, "tokens": [25276, 2, 1604], "token_strs": ["abc", "<|im_end|>", "def"]}
    messages, ids = CHATS[0]
    rendered = (await client.post("/tokenize", json={"messages": messages})).json()
    assert rendered["tokens"] == ids and rendered["token_strs"] is None
    text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert text == {"prompt": "abc<|im_end|>def"}


async def test_tokenize_refuses(client: httpx.AsyncClient) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 524_289}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 400 and error_of(response)["param"] == param, (path, body)
    assert (await client.post("/tokenize", json={"model": "other", "prompt": "x"})).status_code == 404


def keyed_client(backend: FakeBackend) -> httpx.AsyncClient:
    app = build_app(backend, smollm2(), RouterConfig(api_keys=("key-one", "key-two")))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


@pytest.fixture
def keyed() -> tuple[FakeBackend, httpx.AsyncClient]:
    backend = FakeBackend()
    return backend, keyed_client(backend)


async def test_keys_open_the_door_and_keep_tenants_apart(keyed: tuple[FakeBackend, httpx.AsyncClient]) -> None:
    backend, client = keyed
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-one"}, {"authorization": "Bearer"}):
        for path in (CHAT, "/v1/models", "/tokenize", "/nowhere"):
            response = await client.request("GET" if "models" in path else "POST", path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert (await client.get(path)).status_code == 200
    assert re.search(r'^rantang:requests_invalid_total\{.*status="401".*\} 16\.0$', (await client.get("/metrics")).text, re.M)
    body = {"model": "smollm2", "messages": HI}
    seen = []
    for key, salt in (("key-one", None), ("key-one", None), ("key-two", None), ("key-one", "mine"), ("key-two", "mine")):
        response = await client.post(CHAT, json=body | {"cache_salt": salt}, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200
        request = backend.batches[-1].requests[0]
        assert key not in repr(request)
        seen.append((request.tenant, request.cache_salt, request.block_keys[0]))
    assert seen[0] == seen[1] and len(set(seen)) == 4
    assert len({salt for _, salt, _ in seen}) == len({block for _, _, block in seen}) == 4  # shared within a tenant only
    assert len({tenant for tenant, _, _ in seen}) == 2
