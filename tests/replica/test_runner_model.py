"""The runner: limits, seeds across companies, failures that stay with their row, several ranks, and the real model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.held_model import _empty_pool
from replica.kv_pool import size_pool
from replica.models.config import read_model_config
from replica.parallel.step_decoder import StepDecoder
from replica.parallel.step_encoder import StepEncoder
from replica.runner import ModelRunner
from replica.step import BlockCopy, Draw, Row, Runner, Step
from tests.replica import parallel_ranks as ranks
from tests.replica.golden import divergences, golden_length, mean_logprob_error
from tests.replica.model_driver import Driver, greedy
from tests.replica.tiny_llama import write_tiny_llama

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "smollm2.json"


def runner_of(directory: Path, **changes: Any) -> ModelRunner:
    config = {"dtype": "float32", "num_gpu_blocks_override": 64, "num_threads": 1, **changes}
    return ModelRunner(EngineConfig(model=str(directory), **config))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return runner_of(checkpoint)


def test_identity_limits_and_stages(checkpoint: Path) -> None:
    heard: list[str] = []
    config = EngineConfig(model=str(checkpoint), dtype="float32", served_model_name="tiny", max_num_seqs=3, num_threads=1)
    one: Runner = (runner := ModelRunner(config, on_stage=lambda name, seconds: heard.append(name) if seconds >= 0 else None))
    assert heard == ["model files", "KV pool", "weights"]
    assert runner.model == "tiny" and runner.fingerprint == resolve(str(checkpoint)).fingerprint and runner.revision
    assert (one.limits.max_model_len, one.limits.max_num_seqs, one.limits.vocab_size, one.eos_token_ids) == (512, 3, 132, {2})
    assert runner.kv_block_bytes == 3 * 2 * 3 * 16 * 8 * 4
    assert one.limits.num_blocks == 512 * 1024 * 1024 // runner.kv_block_bytes
    one.close()
    one.close()


def test_pool_decides_the_context_and_refuses_with_both_numbers() -> None:
    model = read_model_config(resolve("smollm2"))
    assert size_pool(EngineConfig(), model, 2).num_blocks == 1456 and size_pool(EngineConfig(), model, 2).max_model_len == 8192
    small = EngineConfig(num_gpu_blocks_override=10)
    assert size_pool(small, model, 2).max_model_len == 160
    assert size_pool(EngineConfig(num_gpu_blocks_override=10, max_model_len=160), model, 2).max_model_len == 160
    with pytest.raises(ModelError, match=r"max_model_len 161 does not fit the KV pool of 160 tokens"):
        size_pool(EngineConfig(num_gpu_blocks_override=10, max_model_len=161), model, 2)
    with pytest.raises(ModelError, match="max_model_len 9000 exceeds the model's context of 8192"):
        size_pool(EngineConfig(max_model_len=9000), model, 2)
    with pytest.raises(ModelError, match="holds no KV block"):
        size_pool(EngineConfig(kv_cache_memory_bytes=1000), model, 2)


def test_largest_legal_sequence_is_served(checkpoint: Path) -> None:
    runner = runner_of(checkpoint, num_gpu_blocks_override=3, block_size=5)
    assert runner.limits.max_model_len == 15
    assert len(Driver(runner).generate([3] * 14, greedy(1))) == 1
    assert len(Driver(runner).generate([3], greedy(14), chunk=4)) == 14


def test_a_pool_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="KV pool of 288230376151711744 bytes cannot be allocated"):
        _empty_pool((2**57,), torch.bfloat16, torch.device("cpu"))


def test_seeded_sampling_is_the_same_in_every_setting(runner: ModelRunner, checkpoint: Path) -> None:
    sampling = greedy(16, temperature=1.3, seed=1, top_p=0.95)
    prompt = [9, 8, 7, 6]
    alone = Driver(runner).generate(prompt, sampling)
    assert alone == Driver(runner, shuffle=5).generate(prompt, sampling, chunk=2)
    assert alone != Driver(runner).generate(prompt, greedy(16, temperature=1.3, seed=2, top_p=0.95))
    driver = Driver(runner)
    joined, others = driver.add(prompt, sampling), [driver.add([i] * (i + 2), greedy(9, temperature=1.0, seed=i)) for i in range(1, 8)]
    for _ in range(5):
        driver.step([joined])
    driver.run([*others[:3], joined, *others[3:]])  # neighbours come when it is half done
    assert joined.output == alone
    assert Driver(runner_of(checkpoint)).generate(prompt, sampling) == alone, "another replica"


def test_choices_differ_and_each_repeats(runner: ModelRunner) -> None:
    sampling = greedy(24, temperature=1.2, seed=42)
    driver = Driver(runner)
    choices = driver.run([driver.add([5, 6, 7], sampling, choice) for choice in range(4)])
    assert len({tuple(choice) for choice in choices}) == 4
    assert [Driver(runner).generate([5, 6, 7], sampling, choice=choice) for choice in (0, 3)] == [choices[0], choices[3]]


def test_recompute_after_preemption_continues_the_same_stream(runner: ModelRunner) -> None:
    sampling = greedy(12, temperature=1.2, seed=3, presence_penalty=1.0, repetition_penalty=1.2, min_tokens=12)
    whole = Driver(runner).generate([5, 6, 7], sampling)
    driver = Driver(runner, shuffle=1)
    again = driver.add([5, 6, 7], sampling)
    while len(again.output) < 7:
        driver.step([again])
    again.computed, again.blocks = 0, driver.add([0] * 15, greedy(1)).blocks
    assert driver.run([again], chunk=4)[0] == whole
    assert runner.eos_token_ids.isdisjoint(whole), "min_tokens holds"


def test_a_row_with_nan_fails_alone_and_leaves_its_pages_clean(runner: ModelRunner) -> None:
    def row(request: int, start: int, block: int) -> Row:
        return Row(request, [11], start, [block], Draw(greedy(), 0, [11] * (start + 1), ()))

    pool = runner._pool
    pool[:, 7] = float("nan")
    outcomes = runner.execute(Step(1, (row(1, 5, 7), row(2, 0, 8)))).outcomes
    assert "not finite" in outcomes[0].error and outcomes[0].token is None
    assert outcomes[1].error == "" and outcomes[1].token is not None
    assert bool(pool[:, 7].isfinite().all())
    after = runner.execute(Step(2, (row(3, 0, 7),))).outcomes[0]
    assert after.token == outcomes[1].token, "the page's next owner is not harmed"


def test_a_chunk_with_nan_fails_before_its_blocks_are_published(runner: ModelRunner) -> None:
    """It draws nothing; unnoticed, its pages would become findable, and be scrubbed to zeros when a later chunk fails."""
    runner._pool[:, 7] = float("nan")
    drawing = Row(2, [11], 0, [8], Draw(greedy(), 0, [11], ()))
    broken, sound = Row(1, [11, 12], 5, [7], None), Row(3, [11, 12], 0, [9], None)
    outcomes = runner.execute(Step(1, (broken, drawing, sound))).outcomes
    assert "not finite" in outcomes[0].error and bool(runner._pool[:, 7].isfinite().all())
    assert outcomes[1].error == outcomes[2].error == "" and outcomes[1].token is not None


def test_a_dirty_page_would_harm_its_next_owner(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_scrub", lambda self, row: None)
    runner._pool[:, 7] = float("nan")
    row = Row(3, [11], 0, [7], Draw(greedy(), 0, [11], ()))
    assert "not finite" in runner.execute(Step(1, (row,))).outcomes[0].error
    runner._pool[:, 7] = 0


def forced_steps(prompt: list[int], output: list[int]) -> list[Step]:
    """Prefill in two chunks (the first scored), then decodes fed with known tokens; a copied page on the way."""
    blocks = list(range(20, 30))
    steps = [
        Step(1, (Row(0, prompt[:9], 0, blocks, None, score_from=0),)),
        Step(2, (Row(0, prompt[9:], 9, blocks, Draw(greedy(), 0, prompt, ())),)),
    ]
    moved = [40, *blocks[1:]]
    for index, token in enumerate(output[:-1]):
        draw = Draw(greedy(), 0, prompt, output[: index + 1])
        copies = (BlockCopy(20, 40),) if index == 3 else ()
        steps.append(Step(3 + index, (Row(0, [token], len(prompt) + index, moved if index >= 3 else blocks, draw),), copies))
    return steps


def three_ranks(rank: int, size: int, port: Any, answers: Any, *, directory: Path, steps: list[Step]) -> None:
    group = ranks.join(rank, size, port, deadline_s=60.0)
    runner = ModelRunner(EngineConfig(model=str(directory), dtype="float32", num_gpu_blocks_override=64, num_threads=1), tp=group)
    if rank == 0:
        answers.put((rank, [runner.execute(step) for step in steps]))
    else:
        answers.put((rank, follow_all(runner, steps)))
    group.close()


def follow_all(runner: ModelRunner, steps: list[Step]) -> int:
    """As a rank above 0 does; how many it was told."""
    encoder, decoder = StepEncoder(runner.limits.block_size), StepDecoder(runner.limits.block_size)
    for step in steps:
        told = decoder.decode(encoder.encode(step))
        assert told is not None
        runner.follow(told)
    return len(steps)


@pytest.mark.slow
def test_three_ranks_draw_what_one_draws(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path, tie_word_embeddings=False)
    prompt = [(3 * i) % 130 + 1 for i in range(21)]
    single = runner_of(directory)
    output = Driver(single).generate(prompt, greedy(12))
    steps = forced_steps(prompt, output)
    expected = [single.execute(step) for step in steps]
    results = dict(ranks.run(partial(three_ranks, directory=directory, steps=steps), 3, 3, timeout_s=120.0))
    assert [result.outcomes[0].token for result in results[0]] == [None, *output]
    for ours, theirs in zip(results[0][0].outcomes[0].scores[1:], expected[0].outcomes[0].scores[1:], strict=True):
        assert ours is not None and theirs is not None and abs(ours.logprob - theirs.logprob) < 1e-4
    assert results[1] == results[2] == len(steps)


@pytest.mark.parametrize("left_out", ["", "_scrub", "_copy_blocks"])
def test_who_follows_leaves_the_same_cache_and_scrubs_what_is_broken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    """And where it leaves out either, its cache is another."""
    leading, following = runner_of(checkpoint), runner_of(checkpoint)
    prompt = [(3 * i) % 130 + 1 for i in range(21)]
    broken = Step(90, (Row(1, [11, 12], 5, [7], None), Row(2, [11], 0, [8], Draw(greedy(), 0, [11], ()))))
    steps = [*forced_steps(prompt, [5, 6, 7, 8, 9]), broken]
    for runner in (leading, following):
        runner._pool[:, 7] = float("nan")
    for step in steps:
        leading.execute(step)
    if left_out:
        monkeypatch.setattr(following, left_out, lambda asked: None)
    assert follow_all(following, steps) == len(steps)
    assert bool(leading._pool.isfinite().all())
    assert torch.equal(leading._pool, following._pool) is not bool(left_out)


def test_who_follows_computes_the_logits_of_scored_tokens_and_reads_none(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks they are a collective: as many, of as many states. What becomes of them is rank 0's alone."""
    runner = runner_of(checkpoint)
    forward, logits = type(runner.forward_pass), type(runner.forward_pass).logits
    asked: list[int] = []
    read: list[int] = []

    def ask(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        asked.append(hidden.shape[0])
        return logits(self, hidden)

    def look(_: torch.Tensor, tokens: list[int], tops: list[int]) -> list[None]:
        read.append(len(tokens))
        return [None] * len(tokens)

    monkeypatch.setattr(forward, "logits", ask)
    monkeypatch.setattr("replica.prompt_scores.token_logprobs", look)
    blocks = list(range(20, 30))
    ends, goes_on = Row(0, [5] * 70, 0, blocks, score_from=0), Row(1, [5] * 9, 40, blocks, score_from=42, score_next=5)
    rows = (ends, goes_on, Row(2, [5] * 9, 40, blocks))
    runner.execute(Step(1, rows))
    assert asked == [64, 6, 8] and read == [64, 5, 8]
    assert follow_all(runner, [Step(1, rows)]) == 1
    assert asked == [64, 6, 8] * 2 and read == [64, 5, 8]


@pytest.fixture(scope="module")
def smollm2() -> ModelRunner:
    return ModelRunner(EngineConfig(dtype="float32", num_threads=1, num_gpu_blocks_override=200))


KNOWN = {  # prompt → the greedy continuation in float32, up to the end token or 20 tokens; no top-2 gap below 0.003
    (39393, 216, 19380, 2889, 16520, 8675, 271): (
        28,
        425,
        32564,
        5476,
        367,
        2618,
        39682,
        28,
        425,
        32564,
        5476,
        367,
        2618,
        39682,
        28,
        425,
        32564,
        5476,
        367,
        2618,
    ),
    (30913, 262, 831, 15436, 3745, 1935, 426, 42461): (9924, 28, 216, 33, 41, 40, 34, 28, 216, 34, 32, 32, 36, 28, 216, 34, 32, 33, 34, 28),
    (6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 411, 260, 4626, 28): (
        665,
        436,
        253,
        9357,
        1573,
        4166,
        3365,
        3906,
        4075,
        30,
        2306,
        436,
        1343,
        327,
        874,
        11347,
        284,
        874,
        2606,
        327,
    ),
    (
        1,
        9690,
        198,
        2683,
        359,
        253,
        1733,
        313,
        2583,
        2092,
        15474,
        30,
        2,
        198,
        1,
        4093,
        198,
        1780,
        314,
        253,
        15345,
        3252,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
    ): (49, 15345, 3252, 314, 253, 940, 2678, 804, 281, 2583, 2092, 288, 4249, 940, 281, 253, 15345, 29, 2542, 5710),
    (
        1,
        9690,
        198,
        2683,
        359,
        253,
        30820,
        30,
        11078,
        3287,
        702,
        253,
        30820,
        30,
        2,
        198,
        1,
        4093,
        198,
        31530,
        549,
        563,
        2747,
        30,
        2,
        198,
        1,
        520,
        9531,
        198,
    ): (6407, 28, 549, 549, 549, 1462, 314, 13756, 4290, 1425, 477, 30, 2867, 8612, 28, 549, 5575, 28, 549, 5575),
}


def test_smollm2_says_what_it_is_known_to_say(smollm2: ModelRunner) -> None:
    assert KNOWN
    driver = Driver(smollm2, shuffle=2)
    outputs = driver.run([driver.add(prompt, greedy(len(known))) for prompt, known in KNOWN.items()], chunk=16)
    assert [tuple(output) for output in outputs] == list(KNOWN.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_outputs(dtype: Any) -> None:
    if not GOLDEN.is_file():
        pytest.skip("the recorded reference outputs (golden/) are not beside this checkout")
    items = json.loads(GOLDEN.read_text())["items"]
    runner = ModelRunner(EngineConfig(dtype=dtype, kv_cache_memory_bytes=2 << 30, num_threads=2))
    gap_max = 1e-3 if dtype == "float32" else 0.3
    left = divergences(Driver(runner), items)
    assert all(one.gap < gap_max for one in left), left
    assert sum(golden_length(item) for item in items) > 1000
    assert mean_logprob_error(Driver(runner), items) < (1e-4 if dtype == "float32" else 0.06)
