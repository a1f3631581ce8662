"""The Llama family: embedding, layers of attention and SwiGLU (or experts), norm, head, over a packed batch of tokens.

One residual stream in float32; what enters a matrix multiplication is in the model's dtype. With several ranks each holds
its heads, its part of the feed-forward width and its slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.ops import Operators, Plan
from kernels.reference.rope_kv_write import HeadNorms
from replica.linear import Linear, ReducedLinear, VocabularyEmbedding, VocabularyHead
from replica.models.feed_forward import FeedForward
from replica.models.model_config import ModelConfig
from replica.models.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights on this rank."""

    attention_norm: Tensor  # [H]
    qkv: Linear  # H → (heads + 2 · kv_heads) · D
    head_norms: HeadNorms | None
    attention_out: ReducedLinear  # heads · D → H
    feed_forward_norm: Tensor  # [H]
    feed_forward: FeedForward
    window: int | None  # tokens that a query looks back, itself included


@dataclass(frozen=True, slots=True)
class Llama:
    """The model of one rank. `forward` computes hidden states, `logits` what follows some of them."""

    config: ModelConfig
    layers: tuple[Layer, ...]
    embedding: VocabularyEmbedding
    norm: Tensor  # [H]
    head: VocabularyHead
    rope: RotaryTable
    operators: Operators

    def forward(self, token_ids: Tensor, positions: Tensor, pool: Tensor, plans: Mapping[int | None, Plan]) -> Tensor:
        """token_ids and positions [T] int64, pool [layers, pages, 2, kv_heads, block, D] (written) → hidden states [T, H], float32.

        `plans` has one for each window that a layer has (None: no window).
        What a layer adds is carried to the next norm, which adds it while it reads the stream anyhow.
        """
        ops, epsilon, scale = self.operators, self.config.norm_epsilon, self.config.head_dim**-0.5
        cosine, sine = self.rope.at(positions)
        stream = self.embedding(token_ids)
        delta: Tensor | None = None
        for cache, layer in zip(pool.unbind(), self.layers, strict=True):
            normed = ops.rms_norm(stream, layer.attention_norm, epsilon, delta)
            plan = plans[layer.window]
            queries = ops.rope_kv_write(layer.qkv(normed), cosine, sine, cache, plan, layer.head_norms)
            delta = layer.attention_out(ops.paged_attention(queries, cache, plan, scale))
            normed = ops.rms_norm(stream, layer.feed_forward_norm, epsilon, delta)
            delta = layer.feed_forward(normed)
        return stream if delta is None else stream.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, H] → logits [R, vocabulary], float32, on every rank."""
        return self.head(self.operators.rms_norm(hidden, self.norm, self.config.norm_epsilon, None))
