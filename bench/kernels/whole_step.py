"""A decode step and a prefill of a model of a Llama-8B's shape, with random weights, through the model code that serves."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.kernels.timing import Ceilings, Measured, Timer
from kernels.batch import CacheLayout, PagedBatch
from kernels.ops import Operators, Plan
from replica.linear import Linear, ReducedLinear, VocabularyEmbedding, VocabularyHead
from replica.models.feed_forward import Dense
from replica.models.llama import Layer, Llama
from replica.models.model_config import ModelConfig
from replica.models.rope import RotaryTable, rope_frequencies
from replica.parallel.group import SingleRank

REPEATS = 15
PAGE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int = 32
    hidden: int = 4096
    width: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 128_256


@dataclass(frozen=True, slots=True)
class StepShape:
    """`rows` sequences with `context` tokens computed and `count` new ones each."""

    name: str
    rows: int
    context: int
    count: int


STEPS = (
    StepShape("decode 1 × 1k", 1, 1024, 1),
    StepShape("decode 8 × 4k", 8, 4096, 1),
    StepShape("decode 64 × 1k", 64, 1024, 1),
    StepShape("prefill 2k", 1, 0, 2048),
    StepShape("prefill 8k", 1, 0, 8192),
)


def _config(sizes: Sizes, context: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.width,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        norm_epsilon=1e-5,
        rope_theta=500_000.0,
        trained_context=context,
        eos_token_ids=frozenset(),
        tied_embeddings=True,
    )


def make_model(sizes: Sizes, operators: Operators, place: torch.device, context: int = 8192) -> Llama:
    """bfloat16, random: nothing but its speed means anything. `context` in tokens."""
    tp = SingleRank()
    config = _config(sizes, context)
    rope = RotaryTable(rope_frequencies(sizes.dim, config.rope_theta), context, place)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=place, dtype=torch.bfloat16).mul_(columns**-0.5)

    def ones() -> Tensor:
        return torch.ones(sizes.hidden, device=place, dtype=torch.bfloat16)

    def layer() -> Layer:
        return Layer(
            ones(),
            Linear(matrix((sizes.heads + 2 * sizes.kv_heads) * sizes.dim, sizes.hidden)),
            None,
            ReducedLinear(matrix(sizes.hidden, sizes.heads * sizes.dim), tp),
            ones(),
            Dense(Linear(matrix(2 * sizes.width, sizes.hidden)), ReducedLinear(matrix(sizes.hidden, sizes.width), tp), operators),
            None,
        )

    layers = tuple(layer() for _ in range(sizes.layers))
    table = matrix(sizes.vocab, sizes.hidden)
    return Llama(config, layers, VocabularyEmbedding(table, tp), ones(), VocabularyHead(table, tp), rope, operators)


def weight_bytes(sizes: Sizes) -> int:
    """Read once by every step, the embedding as the head."""
    attention = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.dim * sizes.hidden
    return 2 * (sizes.layers * (attention + 3 * sizes.width * sizes.hidden) + sizes.vocab * sizes.hidden)


def step_of(model: Llama, shape: StepShape, sizes: Sizes, place: torch.device) -> Callable[[], Tensor]:
    """Everything that a step computes on the device once its plan is there: embedding to the greedy tokens."""
    pages = -(-(shape.context + shape.count) // PAGE)
    tables = np.random.default_rng(0).permutation(shape.rows * pages).astype(np.int32).reshape(shape.rows, pages)
    batch = PagedBatch(np.full(shape.rows, shape.context, np.int32), np.full(shape.rows, shape.count, np.int32), tables)
    layout = CacheLayout(sizes.kv_heads, PAGE, sizes.dim)
    pool = torch.zeros((sizes.layers, shape.rows * pages, 2, sizes.kv_heads, PAGE, sizes.dim), dtype=torch.bfloat16, device=place)
    plans: dict[int | None, Plan] = {None: model.operators.plan_attention(batch, layout, torch.bfloat16, place, None)}
    positions = torch.from_numpy(batch.positions.astype(np.int64)).to(place)
    ids = torch.arange(positions.numel(), device=place) % sizes.vocab
    last = torch.from_numpy(np.cumsum(batch.counts) - 1).to(place)

    def step() -> Tensor:
        return model.logits(model.forward(ids, positions, pool, plans)[last]).argmax(-1)

    return step


@torch.inference_mode()
def measure_steps(
    model: Llama, sizes: Sizes, place: torch.device, ceilings: Ceilings, timer: Timer, steps: tuple[StepShape, ...] = STEPS
) -> list[Measured]:
    """`bandwidth` is that of weights and cache, `arithmetic` of the linear layers and attention."""
    results = []
    for shape in steps:
        times, graphed = timer.times_s([step_of(model, shape, sizes, place)], REPEATS)
        median_s = statistics.median(times)
        tokens = shape.rows * shape.count
        cached = 4 * sizes.layers * sizes.kv_heads * sizes.dim * shape.rows * (shape.context + shape.count)
        pairs = shape.rows * shape.count * (shape.context + (shape.count + 1) / 2)
        head = 2 * sizes.vocab * sizes.hidden
        operations = tokens * (weight_bytes(sizes) - head) + shape.rows * head + 4 * pairs * sizes.layers * sizes.heads * sizes.dim
        results.append(
            Measured(
                f"step {shape.name}",
                median_s,
                graphed,
                (weight_bytes(sizes) + cached) / median_s / ceilings.copy_bytes_per_s,
                operations / median_s / ceilings.matmul_operations_per_s,
            )
        )
    return results
