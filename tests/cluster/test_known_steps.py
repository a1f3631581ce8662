"""What is kept of one replica's steps for the next: by node and configuration, and nothing that cannot be true."""

from __future__ import annotations

import msgspec
import pytest

from cluster import known_steps
from replica.config import EngineConfig
from replica.contract.messages import StepTimeCoefficients

MEASURED = StepTimeCoefficients(a=0.01, b=1e-4, c=1e-3, d=1e-6)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    store: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool) -> None:
        assert overwrite
        store[key] = value

    monkeypatch.setattr(known_steps, "_internal_kv_put", put)
    monkeypatch.setattr(known_steps, "_internal_kv_get", store.get)
    return store


def test_what_was_kept_is_recalled_where_it_was_measured_and_nowhere_else(kept: dict[bytes, bytes]) -> None:
    config = EngineConfig(num_threads=2)
    here = known_steps.key(config, "node")
    assert known_steps.recall(here) is None
    known_steps.keep(here, MEASURED)
    assert known_steps.recall(here) == MEASURED
    others = [
        (config, "another"),
        (config.model_copy(update={"num_threads": 1}), "node"),
        (EngineConfig(num_threads=2, dtype="float32"), "node"),
    ]
    assert [known_steps.recall(known_steps.key(*each)) for each in others] == [None] * 3
    assert list(kept) == [here]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(StepTimeCoefficients(a=float("nan"), b=0.0, c=0.0, d=0.0)),
        msgspec.msgpack.encode(StepTimeCoefficients(a=float("inf"), b=0.0, c=0.0, d=0.0)),
        msgspec.msgpack.encode(StepTimeCoefficients(a=1.0, b=-1e-9, c=0.0, d=0.0)),
        msgspec.msgpack.encode(StepTimeCoefficients(a=0.0, b=0.0, c=0.0, d=0.0)),
    ],
)
def test_what_cannot_be_true_is_as_if_nothing_were_kept(content: bytes) -> None:
    assert known_steps.decode(content) is None


def test_what_can_be_true_is_believed() -> None:
    assert known_steps.decode(msgspec.msgpack.encode(MEASURED)) == MEASURED
