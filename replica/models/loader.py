"""From files to a model: the part of the weights that this rank holds, read layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import Operators
from kernels.reference.quantized_weight import QuantizedWeight
from kernels.reference.rope_kv_write import HeadNorms
from replica.contract.model_files import ModelFiles
from replica.linear import Linear, Product, ReducedLinear, VocabularyEmbedding, VocabularyHead, Weight
from replica.models.feed_forward import Dense, Experts
from replica.models.llama import Layer, Llama
from replica.models.loader_gguf import GgufSource
from replica.models.loader_safetensors import SafetensorsSource
from replica.models.model_config import Mixture, ModelConfig
from replica.models.rope import RotaryTable, rope_frequencies
from replica.models.tensors import EMBEDDING, HEAD, NORM, expert_stem
from replica.models.weight_only import Piece, read_quantized
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
    product: Product | None = None  # of the linear layers, instead of torch's own
    quantization: str | None = None  # of the layers' matrices, one of config.WEIGHT_ONLY

    @property
    def layer_product(self) -> Product | None:
        return self.product if self.quantization is None else self.operators.linear_quantized


def open_source(files: ModelFiles, config: ModelConfig) -> WeightSource:
    return GgufSource(files, config) if files.kind == "gguf" else SafetensorsSource(files)


def load_model(config: ModelConfig, source: WeightSource, placement: Placement) -> Llama:
    """At most one layer exists twice at a time.

    Tensors that are missing or misshapen were refused before (models.tensors.check_tensors), sizes that do not divide by
    tp.size too (models.model_config.shard_problem).
    """
    read = _Reader(source, placement)
    layers = tuple(_load_layer(config, read, index, placement) for index in range(config.num_layers))
    table = read.rows(EMBEDDING)
    return Llama(
        config=config,
        layers=layers,
        embedding=VocabularyEmbedding(table, placement.tp),
        norm=read.whole(f"{NORM}.weight"),
        head=VocabularyHead(table if config.tied_embeddings else read.rows(HEAD), placement.tp, placement.product),
        rope=rotary_table(config, source, placement.max_model_len, placement.device),
        operators=placement.operators,
    )


def rotary_table(config: ModelConfig, source: WeightSource, positions: int, device: torch.device) -> RotaryTable:
    scaling = config.rope_scaling
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, scaling, positions)
    if source.has(ROPE_FACTORS):
        frequencies = frequencies / source.read(ROPE_FACTORS).double()
    return RotaryTable(frequencies, positions, device, 1.0 if scaling is None else scaling.attention_factor)


def _load_layer(config: ModelConfig, read: _Reader, index: int, placement: Placement) -> Layer:
    tp, product = placement.tp, placement.layer_product
    stem = f"model.layers.{index}"
    attention = f"{stem}.self_attn"
    qkv = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
    heads = Part(tp.rank, tp.size)
    sharers = max(1, tp.size // config.num_kv_heads)  # ranks that hold the same KV head
    kv = Part(tp.rank // sharers, tp.size // sharers)
    parts = (heads, kv, kv)
    norms = None
    if config.head_norms:
        norms = HeadNorms(read.whole(f"{attention}.q_norm.weight"), read.whole(f"{attention}.k_norm.weight"), config.norm_epsilon)
    return Layer(
        attention_norm=read.whole(f"{stem}.input_layernorm.weight"),
        qkv=Linear(read.matrix(*qkv, parts=parts), read.rows(*qkv, parts=parts, kind="bias") if config.qkv_bias else None, product),
        head_norms=norms,
        attention_out=ReducedLinear(
            read.reduced(f"{attention}.o_proj"), tp, read.whole(f"{attention}.o_proj.bias") if config.output_bias else None, product
        ),
        feed_forward_norm=read.whole(f"{stem}.post_attention_layernorm.weight"),
        feed_forward=_dense(config, read, stem, placement) if config.mixture is None else _experts(config.mixture, read, stem, placement),
        window=config.layer_windows[index],
    )


def _dense(config: ModelConfig, read: _Reader, stem: str, placement: Placement) -> Dense:
    gate_up, down = (f"{stem}.mlp.gate_proj", f"{stem}.mlp.up_proj"), f"{stem}.mlp.down_proj"
    biases = (read.rows(*gate_up, kind="bias"), read.whole(f"{down}.bias")) if config.mlp_bias else (None, None)
    product = placement.layer_product
    return Dense(
        Linear(read.matrix(*gate_up), biases[0], product),
        ReducedLinear(read.reduced(down), placement.tp, biases[1], product),
        placement.operators,
    )


def _experts(mixture: Mixture, read: _Reader, stem: str, placement: Placement) -> Experts:
    """An expert at a time, into the tensors that hold all of them."""
    gate_up = down = torch.empty(0)
    for expert in range(mixture.count):
        one = f"{stem}.{expert_stem(expert)}"
        pair, back = read.rows(f"{one}.gate_proj", f"{one}.up_proj"), read.columns(f"{one}.down_proj")
        if not expert:
            gate_up, down = pair.new_empty((mixture.count, *pair.shape)), back.new_empty((mixture.count, *back.shape))
        gate_up[expert], down[expert] = pair, back
    router = Linear(read.whole(f"{stem}.mlp.gate.weight"), None, placement.product)
    return Experts(mixture, router, gate_up, down, placement.operators, placement.tp)


class _Reader:
    """Reads tensors as this rank wants them: its part, converted, on its device."""

    def __init__(self, source: WeightSource, placement: Placement) -> None:
        self._source = source
        self._dtype = placement.dtype
        self._device = placement.device
        self._part = Part(placement.tp.rank, placement.tp.size)
        self._quantization = placement.quantization

    def whole(self, name: str) -> Tensor:
        """A tensor that every rank holds."""
        return self._joined([self._source.read(name)])

    def rows(self, *stems: str, parts: Sequence[Part] = (), kind: str = "weight") -> Tensor:
        """This rank's part of the rows of several matrices (or vectors), one below the other; `parts` where it is not the same of all."""
        wanted = parts or [self._part] * len(stems)
        return self._joined([self._source.read(f"{stem}.{kind}", rows=part) for stem, part in zip(stems, wanted, strict=True)])

    def columns(self, stem: str) -> Tensor:
        """This rank's part of the columns of one matrix."""
        return self._joined([self._source.read(f"{stem}.weight", columns=self._part)])

    def matrix(self, *stems: str, parts: Sequence[Part] = ()) -> Weight:
        """`rows` of a layer's matrices, quantised where that is asked for."""
        if self._quantization is None:
            return self.rows(*stems, parts=parts)
        wanted = parts or [self._part] * len(stems)
        return self._quantized([Piece(f"{stem}.weight", rows=part) for stem, part in zip(stems, wanted, strict=True)], self._quantization)

    def reduced(self, stem: str) -> Weight:
        """This rank's part of the columns of a layer's matrix, quantised where that is asked for."""
        if self._quantization is None:
            return self.columns(stem)
        return self._quantized([Piece(f"{stem}.weight", columns=self._part)], self._quantization)

    def _quantized(self, pieces: list[Piece], quantization: str) -> QuantizedWeight:
        return read_quantized(self._source, pieces, quantization, self._device)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """One tensor of its own memory: never a view of the mapped file, which would stay resident beside it."""
        converted = [part.to(self._dtype) for part in parts]
        joined = torch.cat(converted) if len(converted) > 1 else converted[0].clone()
        return joined.to(self._device).contiguous()
