"""The architectures that can be served, as data: one row says what sets a member of the Llama family apart from the others.

All of them are decoders of RMS norms, rotary attention with grouped heads and SwiGLU (or experts of it), under the same names of
tensors. What a row leaves to the configuration is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str  # in config.json
    gguf: str | None = None  # in a GGUF's general.architecture
    qkv_bias: bool | None = None  # of queries, keys and values; None: as `attention_bias` says
    output_bias: bool | None = None  # of the attention's output projection; None: as `attention_bias` says
    mlp_bias: bool | None = False  # None: as `mlp_bias` says
    head_norms: bool = False  # every query and key head is normalised before it is rotated
    windowed: Literal["no", "all layers", "some layers"] = "no"  # where sliding_window holds
    window_default: int | None = None  # tokens, where the configuration is silent
    head_dim_default: int | None = None  # where the configuration is silent; None: hidden_size ÷ heads
    experts: bool = False  # feed-forward layers are mixtures of experts
    gguf_interleaves: bool = False  # its GGUF files keep the rows of a query or key head as pairs


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", mlp_bias=None, gguf_interleaves=True),
    Architecture("MistralForCausalLM", None, False, False, windowed="all layers", window_default=4096),  # its GGUF files say llama
    Architecture("Qwen2ForCausalLM", "qwen2", True, False, windowed="some layers"),
    Architecture("Qwen3ForCausalLM", "qwen3", head_norms=True, windowed="some layers", head_dim_default=128),
    Architecture("Qwen3MoeForCausalLM", None, head_norms=True, experts=True),
)


def architecture_named(name: object) -> Architecture | None:
    """The row of a config.json's architecture."""
    return next((row for row in ARCHITECTURES if row.name == name), None)


def architecture_of_gguf(name: str) -> Architecture | None:
    """The row of a GGUF's general.architecture."""
    return next((row for row in ARCHITECTURES if row.gguf == name), None)
