"""What is kept of one replica's steps for the next: by node, configuration and what computes, and nothing that cannot be true."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cluster import known_steps, replica_deployment
from cluster.known_steps import KnownSteps
from cluster.replica_deployment import Replica
from kernels.cpu.build import ISA_VARIABLE
from kernels.names import KERNELS_VARIABLE
from replica.config import EngineConfig
from replica.contract.messages import EngineLimits, LoadReport, StepTimeCoefficients
from replica.parallel import all_reduce
from router.policy.report_check import load_fault

MEASURED = StepTimeCoefficients(a=0.01, b=1e-4, c=1e-3, d=1e-6)
LEARNED = StepTimeCoefficients(a=0.02, b=1e-4, c=1e-3, d=1e-6)
CONFIG = EngineConfig(num_threads=2)
COMPUTES = ("weights", "main", "bfloat16", "C++ step")


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, event: str, reason: str) -> None:
        self.lines.append(f"{event}: {reason}")

    def info(self, event: str) -> None:
        pass


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    store: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool) -> None:
        assert overwrite
        store[key] = value

    monkeypatch.setattr(known_steps, "_internal_kv_put", put)
    monkeypatch.setattr(known_steps, "_internal_kv_get", store.get)
    return store


def recalled(config: EngineConfig = CONFIG, node: str = "node", computes: tuple[str, ...] = COMPUTES) -> StepTimeCoefficients | None:
    return KnownSteps(config, node, Log()).recall(computes)


def test_what_was_kept_is_recalled_where_it_was_measured_and_nowhere_else(
    kept: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = KnownSteps(CONFIG, "node", Log())
    assert one.recall(COMPUTES) is None
    one.keep(MEASURED)
    assert recalled() == MEASURED
    assert recalled(node="another") is None
    assert recalled(CONFIG.model_copy(update={"num_threads": 1})) is None
    assert recalled(EngineConfig(num_threads=2, dtype="float32")) is None
    for place in range(len(COMPUTES)):
        assert recalled(computes=(*COMPUTES[:place], "another", *COMPUTES[place + 1 :])) is None
    for variable in known_steps.VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "another")
            assert recalled() is None
    monkeypatch.setattr(known_steps, "_version", lambda package: "another")
    assert recalled() is None
    assert len(kept) == 1


def test_the_variables_are_those_that_choose_what_computes() -> None:
    assert known_steps.VARIABLES == (KERNELS_VARIABLE, ISA_VARIABLE, all_reduce.VARIABLE)


def test_the_latest_counts(kept: dict[bytes, bytes]) -> None:
    one = KnownSteps(CONFIG, "node", Log())
    one.recall(COMPUTES)
    one.keep(MEASURED)
    other = KnownSteps(CONFIG, "node", Log())
    assert other.recall(COMPUTES) == MEASURED
    other.keep(LEARNED)
    assert recalled() == LEARNED
    one.keep(MEASURED)  # it has learned nothing since
    assert recalled() == LEARNED


def test_where_no_step_was_timed_nothing_is_kept(kept: dict[bytes, bytes]) -> None:
    KnownSteps(CONFIG, "node", Log()).keep(MEASURED)
    assert not kept


IMPOSSIBLE = [
    StepTimeCoefficients(a=math.nan, b=0.0, c=0.0, d=0.0),
    StepTimeCoefficients(a=math.inf, b=0.0, c=0.0, d=0.0),
    StepTimeCoefficients(a=1.0, b=-1e-9, c=0.0, d=0.0),
    StepTimeCoefficients(a=0.0, b=0.0, c=0.0, d=0.0),
    StepTimeCoefficients(a=1e300, b=0.0, c=0.0, d=0.0),
    StepTimeCoefficients(a=0.01, b=3599.0, c=0.0, d=0.0),  # of one token: a full step takes longer than a router believes
    StepTimeCoefficients(a=0.01, b=0.0, c=0.0, d=0.0, e=1.0),
]


@pytest.mark.parametrize("content", [b"", b"\xff", msgspec.msgpack.encode([1.0]), *map(msgspec.msgpack.encode, IMPOSSIBLE)])
def test_what_cannot_be_true_is_as_if_nothing_were_kept(content: bytes) -> None:
    assert known_steps.decode(content, CONFIG) is None


@pytest.mark.parametrize("measured", IMPOSSIBLE)
def test_what_cannot_be_true_is_not_kept(kept: dict[bytes, bytes], measured: StepTimeCoefficients) -> None:
    one = KnownSteps(CONFIG, "node", Log())
    one.recall(COMPUTES)
    one.keep(measured)
    assert not kept


def test_what_can_be_true_is_believed() -> None:
    assert known_steps.decode(msgspec.msgpack.encode(MEASURED), CONFIG) == MEASURED


@pytest.mark.parametrize(
    "values", [(1.0, 1.0, 1.0, 0.0, 0.0), (3e3, 0.0, 0.0, 0.0, 0.0), (3601.0, 0.0, 0.0, 0.0, 0.0), (1e300, 0.0, 0.0, 0.0, 0.0)]
)
def test_no_router_refuses_a_replica_for_what_it_recalled(values: tuple[float, ...]) -> None:
    k = StepTimeCoefficients(*values)
    limits = EngineLimits(
        max_model_len=512, max_num_seqs=64, max_num_batched_tokens=512, num_blocks=99, block_size=16, max_waiting=9, vocab_size=9
    )
    load = LoadReport(0, 0, 0, 0, 0, 9, 9, step_time=k, predicted_step_s=values[0])
    refused = load_fault(load, limits) is not None
    assert refused == (max(values) > 3600)
    assert known_steps.is_possible(k, CONFIG) == (not refused)


@pytest.mark.parametrize("error", [RuntimeError("no GCS\nUnavailable"), AttributeError("'NoneType' object has no attribute")])
def test_a_store_that_does_not_answer_costs_a_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(known_steps, "_internal_kv_put", fail)
    monkeypatch.setattr(known_steps, "_internal_kv_get", fail)
    log = Log()
    one = KnownSteps(CONFIG, "node", log)
    assert one.recall(COMPUTES) is None
    one.keep(MEASURED)
    said = str(error).splitlines()[-1]
    assert log.lines == [f"what steps take here cannot be recalled: {said}", f"what steps take here cannot be kept: {said}"]


class Server:
    step_time = MEASURED

    async def drain(self, timeout_s: float) -> bool:
        self.step_time = LEARNED
        return True

    async def stop(self) -> None:
        pass


class Undeployed(Replica):
    """Without what Serve does at its end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def stopped(meanwhile: Callable[[], Any]) -> None:
    """A replica from ready to its end."""
    replica: Any = object.__new__(Undeployed)
    replica._ranks, replica._drain_timeout_s, replica._log, replica._server = None, 1.0, Log(), Server()
    replica._steps = KnownSteps(CONFIG, "node", Log())
    replica._steps.recall(COMPUTES)
    replica._keeping = asyncio.create_task(replica._keep_steps())
    for _ in range(100):
        await asyncio.sleep(0.01)
        if meanwhile():
            break
    await Replica.__del__(replica)
    assert replica._keeping.cancelling() or replica._keeping.done()


async def test_a_replica_keeps_what_it_has_measured_and_in_the_end_what_it_has_learned(kept: dict[bytes, bytes]) -> None:
    seen: list[StepTimeCoefficients | None] = []

    def first() -> bool:
        seen.append(recalled())
        return seen[-1] is not None

    await stopped(first)
    assert seen[-1] == MEASURED and recalled() == LEARNED


@pytest.mark.parametrize(("every_s", "kept_before_the_end"), [(0.0, 3), (1e6, 1)])
async def test_a_replica_keeps_from_time_to_time_what_it_has_learned(
    kept: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch, every_s: float, kept_before_the_end: int
) -> None:
    monkeypatch.setattr(replica_deployment, "KEEP_EVERY_S", every_s)
    learning = iter(StepTimeCoefficients(a=0.01 + 1e-5 * i, b=0.0, c=0.0, d=0.0) for i in range(10**6))
    monkeypatch.setattr(Server, "step_time", property(lambda server: next(learning), lambda server, value: None))
    seen: set[StepTimeCoefficients] = set()

    def thrice() -> bool:
        seen.update(filter(None, [recalled()]))
        return len(seen) == 3

    await stopped(thrice)
    assert len(seen) == kept_before_the_end
