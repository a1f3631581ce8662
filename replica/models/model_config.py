"""What a model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from replica.contract.model_error import ModelError
from replica.models.rope_scaling import RopeScaling

CONTEXT_DEFAULT = 2048  # tokens, where a configuration does not say


@dataclass(frozen=True, slots=True)
class Mixture:
    """Every feed-forward layer is one of `count` experts; a token goes to `per_token` of them."""

    count: int
    per_token: int
    renormalize: bool  # the router's weights of a token's experts add up to 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes are those of the whole model, not of a rank's part."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert, where there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    trained_context: int  # tokens: what positions were made for, before any scaling
    eos_token_ids: frozenset[int]
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False  # the head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    head_norms: bool = False  # every query and key head is normalised before it is rotated
    mixture: Mixture | None = None
    windows: tuple[int | None, ...] = ()  # of every layer: how many tokens a query looks back, itself included; empty: all look back to 0

    @property
    def max_model_len(self) -> int:
        """Context in tokens, unless less is asked for."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "yarn":
            return self.trained_context
        return max(self.trained_context, int(scaling.original_context * scaling.factor))

    @property
    def context_max(self) -> int:
        """What may be asked for: with dynamic scaling more than comes by itself, because it changes every answer."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "dynamic":
            return self.max_model_len
        return int(self.trained_context * scaling.factor)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """One for each layer."""
        return self.windows or (None,) * self.num_layers

    def kv_heads_of_rank(self, tp_size: int) -> int:
        """Each rank's own, or one that it shares with others where there are fewer heads than ranks."""
        return max(1, self.num_kv_heads // tp_size)


def checked(config: ModelConfig, where: Path) -> ModelConfig:
    """`config`, if its sizes go together. Raises ModelError."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_kv_heads} KV heads do not divide {config.num_heads} heads")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim {config.head_dim} is odd")
    if config.rope_scaling is not None and config.rope_scaling.kind in ("dynamic", "yarn") and config.head_dim < 4:
        raise ModelError(f"{where}: head_dim {config.head_dim} is too small for rope scaling {config.rope_scaling.kind!r}")
    return config


def shard_problem(config: ModelConfig, tp_size: int) -> str:
    """Why this model cannot be split over `tp_size` ranks, with the sizes that work; '' when it can."""
    sizes = {
        "attention heads": config.num_heads,
        "feed-forward width": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    wrong = [f"{name} ({value})" for name, value in sizes.items() if value % tp_size]
    if _splits_unevenly(config.num_kv_heads, tp_size):
        wrong.insert(1 if config.num_heads % tp_size else 0, f"KV heads ({config.num_kv_heads})")
    if not wrong:
        return ""
    fitting = [
        str(n)
        for n in range(1, config.num_heads + 1)
        if not any(value % n for value in sizes.values()) and not _splits_unevenly(config.num_kv_heads, n)
    ]
    return f"tensor_parallel_size {tp_size} does not divide {', '.join(wrong)}; sizes that work: {', '.join(fitting)}"


def _splits_unevenly(kv_heads: int, tp_size: int) -> bool:
    """Neither has each rank as many heads as the others, nor each head as many ranks."""
    return bool(kv_heads % tp_size and tp_size % kv_heads)
