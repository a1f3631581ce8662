"""Random checkpoints of every architecture, written by transformers itself, and its idea of what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 132
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
_WHOLE = {"norm_topk_prob": True, "pad_token_id": 0}
# name → (transformers' model type, what differs)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windowed": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **_WHOLE}),
}
DENSE = tuple(name for name in FAMILIES if not name.endswith("-moe"))  # those without experts


def write_family(directory: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint directory (without a tokenizer) of `family`, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, differing = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**_SIZES, **differing, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh ones are too small to tell models apart, and norms are all ones
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (2.0 / parameter.shape[1] ** 0.5))
    model.save_pretrained(directory)
    return directory


def family_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits [T, V] of one sequence, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
