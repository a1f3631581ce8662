"""Our Llama against transformers', in float32: cold, chunked, with reuse, among strangers, over shuffled pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replica.config import EngineConfig
from replica.runner import ModelRunner
from replica.step import BlockCopy, Draw, Row, Step
from tests.replica.model_driver import Driver, greedy
from tests.replica.tiny_llama import reference_logits, write_tiny_llama

TOKENS = [(7 * i * i + 3 * i) % 130 + 1 for i in range(90)]


def runner_of(directory: Path, **changes: object) -> ModelRunner:
    config = {"dtype": "float32", "num_gpu_blocks_override": 64, "num_threads": 1, **changes}
    return ModelRunner(EngineConfig(model=str(directory), **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return runner_of(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    return reference_logits(checkpoint, TOKENS)


def logits_of(runner: ModelRunner, *rows: Row) -> torch.Tensor:
    return runner.forward(Step(0, rows)).clone()


def row(start: int, stop: int, blocks: list[int], *, draws: bool = True) -> Row:
    draw = Draw(greedy(), 0, TOKENS[:stop], ()) if draws else None
    return Row(0, TOKENS[start:stop], start, blocks, draw)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() < 1e-4)


def test_cold_prompt_of_every_kind_of_length(runner: ModelRunner, expected: torch.Tensor) -> None:
    for length in (1, 2, 15, 16, 17, 31, 90):
        assert close(logits_of(runner, row(0, length, [5, 9, 2, 40, 41, 3]))[0], expected[length - 1]), length


@pytest.mark.parametrize("chunk", [1, 3, 16, 25, 64])
def test_chunked_prefill(runner: ModelRunner, expected: torch.Tensor, chunk: int) -> None:
    blocks = [33, 4, 60, 11, 12, 0]
    for start in range(0, 90, chunk):
        stop = min(90, start + chunk)
        assert close(logits_of(runner, row(start, stop, blocks))[0], expected[stop - 1]), (start, stop)


def test_prefix_of_another_request_is_reused_and_its_tail_copied(runner: ModelRunner, expected: torch.Tensor) -> None:
    first = [8, 13, 21, 34, 55, 1]
    logits_of(runner, row(0, 90, first))
    shared = [*first[:3], 50, 51, 52]  # three full pages; the fourth is copied, and only one of its tokens recomputed
    copied = runner.forward(Step(1, (row(63, 64, shared),), (BlockCopy(34, 50),)))
    assert close(copied[0], expected[63])
    assert close(logits_of(runner, row(64, 90, shared))[0], expected[89])


def test_row_without_its_copy_would_differ(runner: ModelRunner, expected: torch.Tensor) -> None:
    logits_of(runner, row(0, 90, [8, 13, 21, 34, 55, 1]))
    runner.forward(Step(1, (Row(9, [5] * 16, 0, [50], Draw(greedy(), 0, [5] * 16, ())),)))
    assert not close(logits_of(runner, row(63, 64, [8, 13, 21, 50]))[0], expected[63])


def test_mixed_batch_among_strangers(runner: ModelRunner, expected: torch.Tensor) -> None:
    """Decodes of very different lengths, a chunk with context, a cold prompt and a partial prefill in one step."""
    long, short, chunk = [1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11]
    logits_of(runner, row(0, 89, long, draws=False), row(0, 4, short, draws=False), row(0, 20, chunk, draws=False))
    logits = logits_of(
        runner,
        row(4, 5, short),
        row(20, 50, chunk),
        row(0, 33, [20, 21, 22]),
        row(0, 12, [30], draws=False),
        row(89, 90, long),
        row(0, 1, [31]),
    )
    for got, length in zip(logits, (5, 50, 33, 90, 1), strict=True):
        assert close(got, expected[length - 1]), length


def test_decode_batch_equals_each_alone(runner: ModelRunner) -> None:
    prompts = [[(5 * i + 11 * j) % 130 + 1 for j in range(3 + 9 * i)] for i in range(6)]
    batched = Driver(runner, shuffle=3)
    together = batched.run([batched.add(prompt, greedy(12)) for prompt in prompts], chunk=10)
    alone = [Driver(runner).generate(prompt, greedy(12)) for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=["untied", "biases", "no grouping", "one KV head", "llama3 rope", "linear rope"],
)
def test_variants_of_the_family(tmp_path: Path, changes: dict[str, object]) -> None:
    directory = write_tiny_llama(tmp_path, shards=2, **changes)
    logits = logits_of(runner_of(directory), row(0, 70, [3, 1, 4, 15, 9]))
    assert close(logits[0], reference_logits(directory, TOKENS[:70])[-1])


def test_bfloat16_stays_near_float32(checkpoint: Path, expected: torch.Tensor) -> None:
    logits = logits_of(runner_of(checkpoint, dtype="bfloat16"), row(0, 90, [3, 1, 4, 15, 9, 2]))
    error = (logits[0].log_softmax(-1) - expected[89].log_softmax(-1)).abs().mean()
    assert error < 0.1 * expected[89].std()


def test_prompt_scores_equal_in_one_row_and_in_chunks(runner: ModelRunner, expected: torch.Tensor) -> None:
    logprobs = expected.log_softmax(-1)
    blocks = [5, 9, 2, 40, 41, 3]
    whole = runner.execute(Step(1, (Row(0, TOKENS[:40], 0, blocks, None, score_from=0, score_top=2),))).outcomes[0].scores
    first = (
        runner.execute(Step(2, (Row(1, TOKENS[:20], 0, blocks, None, score_from=0, score_top=2, score_next=TOKENS[20]),)))
        .outcomes[0]
        .scores
    )
    second = runner.execute(Step(3, (Row(1, TOKENS[20:40], 20, blocks, None, score_from=21, score_top=2),))).outcomes[0].scores
    assert whole[0] is None and len(whole) == 40 and len(first) == 21 and len(second) == 19
    for position, (score, again) in enumerate(zip(whole, (*first, *second), strict=True)):
        if score is None or again is None:
            continue
        assert score.token_id == again.token_id == TOKENS[position]
        assert abs(score.logprob - float(logprobs[position - 1, TOKENS[position]])) < 1e-4
        assert abs(again.logprob - score.logprob) < 1e-4
        assert [token for token, _ in score.top] == logprobs[position - 1].topk(2).indices.tolist()
