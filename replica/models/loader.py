"""From files to a model: the part of the weights that this rank holds, read layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import Operators
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles
from replica.linear import Linear, ReducedLinear, VocabularyEmbedding, VocabularyHead
from replica.models.config import ModelConfig
from replica.models.llama import Layer, Llama
from replica.models.loader_gguf import GgufSource
from replica.models.loader_safetensors import SafetensorsSource
from replica.models.rope import RotaryTable, rope_frequencies
from replica.models.weight_source import Part, WeightSource
from replica.parallel.group import TensorParallel

ROPE_FACTORS = "rope_freqs.weight"  # in some GGUF files: what the frequencies are divided by


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model is held."""

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    operators: Operators
    max_model_len: int  # tokens, for the rotary table


def open_source(files: ModelFiles, config: ModelConfig) -> WeightSource:
    return GgufSource(files, config.head_dim) if files.kind == "gguf" else SafetensorsSource(files)


def load_model(config: ModelConfig, source: WeightSource, placement: Placement) -> Llama:
    """At most one layer exists twice at a time.

    Raises ModelError for tensors that are missing or not of the configuration's shape. Sizes that do not divide by tp.size
    were refused before (models.config.shard_problem).
    """
    read = _Reader(source, placement)
    layers = tuple(_load_layer(config, read, f"model.layers.{index}", placement.tp) for index in range(config.num_layers))
    table = read.rows({"model.embed_tokens": config.vocab_size}, config.hidden_size)
    tied = config.tied_embeddings or not source.has("lm_head.weight")
    head = table if tied else read.rows({"lm_head": config.vocab_size}, config.hidden_size)
    return Llama(
        config=config,
        layers=layers,
        embedding=VocabularyEmbedding(table, placement.tp),
        norm=read.whole("model.norm.weight", config.hidden_size),
        head=VocabularyHead(head, placement.tp),
        rope=rotary_table(config, source, placement.max_model_len, placement.device),
        operators=placement.operators,
    )


def rotary_table(config: ModelConfig, source: WeightSource, positions: int, device: torch.device) -> RotaryTable:
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    if source.has(ROPE_FACTORS):
        frequencies = frequencies / source.read(ROPE_FACTORS).double()
    return RotaryTable(frequencies, positions, device)


def _load_layer(config: ModelConfig, read: _Reader, stem: str, tp: TensorParallel) -> Layer:
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
    qkv = {f"{attention}.q_proj": query_width, f"{attention}.k_proj": kv_width, f"{attention}.v_proj": kv_width}
    gate_up = {f"{mlp}.gate_proj": width, f"{mlp}.up_proj": width}
    output_bias = read.whole(f"{attention}.o_proj.bias", hidden) if config.output_bias else None
    down_bias = read.whole(f"{mlp}.down_proj.bias", hidden) if config.mlp_bias else None
    return Layer(
        attention_norm=read.whole(f"{stem}.input_layernorm.weight", hidden),
        qkv=Linear(read.rows(qkv, hidden), read.rows(qkv, hidden, "bias") if config.attention_bias else None),
        attention_out=ReducedLinear(read.columns(f"{attention}.o_proj", (hidden, query_width)), tp, output_bias),
        feed_forward_norm=read.whole(f"{stem}.post_attention_layernorm.weight", hidden),
        gate_up=Linear(read.rows(gate_up, hidden), read.rows(gate_up, hidden, "bias") if config.mlp_bias else None),
        down=ReducedLinear(read.columns(f"{mlp}.down_proj", (hidden, width)), tp, down_bias),
    )


class _Reader:
    """Reads tensors as this rank wants them: its part, checked, converted, on its device."""

    def __init__(self, source: WeightSource, placement: Placement) -> None:
        self._source = source
        self._dtype = placement.dtype
        self._device = placement.device
        self._part = Part(placement.tp.rank, placement.tp.size)

    def whole(self, name: str, size: int) -> Tensor:
        """A vector that every rank holds."""
        self._expect(name, (size,))
        return self._joined([self._source.read(name)])

    def rows(self, fused: dict[str, int], width: int, kind: str = "weight") -> Tensor:
        """This rank's part of the rows of several matrices [size, width] (or vectors [size]), one below the other."""
        parts = []
        for stem, size in fused.items():
            name = f"{stem}.{kind}"
            self._expect(name, (size, width) if kind == "weight" else (size,))
            parts.append(self._source.read(name, rows=self._part))
        return self._joined(parts)

    def columns(self, stem: str, shape: tuple[int, int]) -> Tensor:
        """This rank's part of the columns of one matrix."""
        self._expect(f"{stem}.weight", shape)
        return self._joined([self._source.read(f"{stem}.weight", columns=self._part)])

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._source.shape(name)
        if found != shape:
            raise ModelError(f"tensor {name} has the shape {list(found)}; the configuration says {list(shape)}")

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """One tensor of its own memory: never a view of the mapped file, which would stay resident beside it."""
        converted = [part.to(self._dtype) for part in parts]
        joined = torch.cat(converted) if len(converted) > 1 else converted[0].clone()
        return joined.to(self._device).contiguous()
