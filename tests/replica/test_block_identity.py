"""A KV block has one identity and one life: no content under another's name, nothing of an earlier request in a later one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from core_harness import Driver, PagedRunner, ids, limits

from replica import intake, kv_manager
from replica.contract.blocks import block_key, block_keys, root_key
from replica.contract.messages import FinishReason
from replica.kv_manager import KvManager
from replica.request import Request
from replica.step import Outcome, Row


def texts_of_many_prompts() -> tuple[list[list[int]], list[bytes]]:
    """Two hundred prompts of three blocks, one after another in one engine: their texts, and the keys of their blocks."""
    driver = Driver(PagedRunner(limits(1024)), check=False)
    texts, keys = [], []
    for i in range(200):
        prompt = [3 + (i * 131 + position * (7 + i)) % 990 for position in range(48)]
        attempt = driver.add(prompt, 2, seed=1)
        request = driver.engine.ledger.find(0, attempt)
        assert request is not None
        keys += request.keys
        driver.run()
        texts.append(driver.text(attempt))
    return texts, keys


def test_different_content_has_different_keys_and_gets_its_own_text() -> None:
    texts, keys = texts_of_many_prompts()  # the runner compares what the pages hold with the request's tokens
    assert all(len(text) == 2 for text in texts)
    assert len(set(keys)) == len(keys) == 600


def test_keys_of_four_bits_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""

    def short(key: bytes) -> bytes:
        return bytes([key[0] & 0xF]) * 16

    monkeypatch.setattr(kv_manager, "block_key", lambda parent, tokens: short(block_key(parent, tokens)))
    monkeypatch.setattr(intake, "block_keys", lambda root, tokens, size: tuple(map(short, block_keys(root, tokens, size))))
    with pytest.raises(AssertionError, match="do not hold this request's tokens"):
        texts_of_many_prompts()


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from replica.contract.blocks import *; r = root_key(model='m', revision='r', adapter='a', cache_salt=b's');"
        "print([k.hex() for k in block_keys(r, range(40), 16)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    root = root_key(model="m", revision="r", adapter="a", cache_salt=b"s")
    assert outputs == {(str([key.hex() for key in block_keys(root, range(40), 16)]) + "\n").encode()}


def test_encodings_cannot_be_confused() -> None:
    root = root_key(model="m", revision="r")
    assert block_key(root, [1, 23]) != block_key(root, [12, 3])
    assert root_key(model="mn", revision="r") != root_key(model="m", revision="nr")
    assert root_key(model="m", revision="r", adapter="x") != root_key(model="m", revision="r", cache_salt=b"x")


@pytest.mark.parametrize(("policy", "times"), [("adaptive", 100), ("iteration", 16), ("static", 16)])
def test_nothing_of_an_earlier_request_is_left_for_a_later_one(policy: str, times: int) -> None:
    """Normal, failing half-way, cancelled, at the end of the context, normal again: a hundred times."""
    driver = Driver(PagedRunner(limits(12, context=96, seqs=2)), batching=policy)

    def ill(row: Row) -> str:
        return "no token" if row.draw is not None and row.draw.sampling.seed == 77 and len(row.draw.output_ids) == 5 else ""

    driver.runner.error_for = ill
    normal: list[list[int]] = []
    for i in range(times):
        failing = driver.add(ids(1, 40), 20, seed=77)
        driver.run()
        assert driver.finish(failing) is FinishReason.ERROR and len(driver.text(failing)) == 5
        cancelled = driver.add(ids(1, 40), 20, seed=3)
        for _ in range(i % 8):
            driver.step()
        driver.engine.cancel(0, cancelled)
        longest = driver.add(ids(2, 60), 1000, seed=4)
        driver.run()
        assert driver.finish(cancelled) is FinishReason.ABORT and driver.finish(longest) is FinishReason.LENGTH
        again = driver.add(ids(1, 40), 20, seed=5)
        driver.run()
        normal.append(driver.text(again))
        assert driver.engine.roster.kv.pool.referenced == 0
    assert all(text == normal[0] and len(text) == 20 for text in normal)


def a_block_is_kept(patch: pytest.MonkeyPatch) -> None:
    release = KvManager.release

    def forgetful(kv: KvManager, request: Request) -> None:
        request.blocks = request.blocks[:-1]
        release(kv, request)

    patch.setattr(KvManager, "release", forgetful)


def draws_remember(patch: pytest.MonkeyPatch) -> None:
    """A slot's randomness depends on who had it before."""
    drawn: list[int] = []
    outcome = PagedRunner._outcome

    def remembering(runner: PagedRunner, row: Row) -> Outcome:
        found = outcome(runner, row)
        drawn.append(row.request)
        return found if found.token is None else replace(found, token=3 + (found.token + len(drawn)) % 900)

    patch.setattr(PagedRunner, "_outcome", remembering)


@pytest.mark.parametrize("sabotage", [a_block_is_kept, draws_remember], ids=lambda sabotage: sabotage.__name__)
def test_with_something_left_of_an_earlier_request_it_fails(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        test_nothing_of_an_earlier_request_is_left_for_a_later_one("adaptive", 16)
