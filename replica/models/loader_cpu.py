"""From files to a decoder in C++: weights read layer by layer and packed as kernels/cpu wants them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import CacheLayout
from kernels.cpu.decoder import Decoder, DecoderLayer, DecoderModel
from kernels.cpu.packed import Groups, PackedMatrix, by_turns, dequantise, pack_bf16, pack_groups, quantise_q4, quantise_q8
from replica.config import Quantization
from replica.contract.model_error import ModelError
from replica.models.config import ModelConfig
from replica.models.rope import RotaryTable
from replica.models.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """What a decoder is given beside its weights."""

    library: ctypes.CDLL
    layout: CacheLayout
    pool: Tensor
    rope: RotaryTable
    threads: int
    quantization: Quantization | None = None  # None: bfloat16


def load_decoder(config: ModelConfig, source: WeightSource, placement: CpuPlacement) -> Decoder:
    """At most one layer exists twice at a time. Raises ModelError for tensors that are missing or of another shape."""
    read = _Reader(source, placement.quantization)
    hidden = config.hidden_size
    layers = tuple(_layer(config, read, f"model.layers.{index}") for index in range(config.num_layers))
    embedding = read.vocabulary("model.embed_tokens", (config.vocab_size, hidden))
    tied = config.tied_embeddings or not source.has("lm_head.weight")
    cosine, sine = placement.rope.halves()
    model = DecoderModel(
        heads=config.num_heads,
        layers=layers,
        embedding=embedding,
        norm=read.vector("model.norm.weight", hidden),
        head=embedding if tied else read.vocabulary("lm_head", (config.vocab_size, hidden)),
        epsilon=config.norm_epsilon,
        attention_scale=config.head_dim**-0.5,
        cosine=cosine,
        sine=sine,
    )
    return Decoder(placement.library, model, placement.layout, placement.pool, placement.threads)


def _layer(config: ModelConfig, read: _Reader, stem: str) -> DecoderLayer:
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
    return DecoderLayer(
        attention_norm=read.vector(f"{stem}.input_layernorm.weight", hidden),
        qkv=read.matrix({f"{attention}.q_proj": query, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}, hidden),
        out=read.matrix({f"{attention}.o_proj": hidden}, query),
        feed_forward_norm=read.vector(f"{stem}.post_attention_layernorm.weight", hidden),
        gate_up=read.gated(f"{mlp}.gate_proj", f"{mlp}.up_proj", (width, hidden)),
        down=read.matrix({f"{mlp}.down_proj": hidden}, width),
        query_norm=read.optional(f"{attention}.q_norm.weight", dim),
        key_norm=read.optional(f"{attention}.k_norm.weight", dim),
    )


class _Reader:
    """Reads tensors, checks their shapes, packs them: bfloat16, or quantised by groups of 32 of a row."""

    def __init__(self, source: WeightSource, quantization: Quantization | None) -> None:
        self._source = source
        self._quantization = quantization

    def matrix(self, fused: dict[str, int], columns: int) -> PackedMatrix:
        """Several matrices [rows, columns], one below the other, with their biases where they have any."""
        biases = [self.optional(f"{stem}.bias", rows) for stem, rows in fused.items()]
        bias = _joined(biases, list(fused.values()))
        names = {f"{stem}.weight": (rows, columns) for stem, rows in fused.items()}
        if self._quantization is None:
            return pack_bf16(torch.cat([self._tensor(name, shape) for name, shape in names.items()]), bias)
        parts = self._groups(names)
        m = None if parts[0].m is None else torch.cat([_minimum(part) for part in parts])
        return pack_groups(Groups(torch.cat([part.q for part in parts]), torch.cat([part.d for part in parts]), m), bias)

    def gated(self, gate: str, up: str, shape: tuple[int, int]) -> PackedMatrix:
        joined = _joined([self.optional(f"{stem}.bias", shape[0]) for stem in (gate, up)], [shape[0], shape[0]])
        bias = None if joined is None else by_turns(*joined.chunk(2))
        names = {f"{stem}.weight": shape for stem in (gate, up)}
        if self._quantization is None:
            return pack_bf16(by_turns(*(self._tensor(name, shape) for name in names)), bias)
        one, other = self._groups(names)
        m = None if one.m is None else by_turns(_minimum(one), _minimum(other))
        return pack_groups(Groups(by_turns(one.q, other.q), by_turns(one.d, other.d), m), bias)

    def vocabulary(self, stem: str, shape: tuple[int, int]) -> PackedMatrix:
        """Embedding and head: with four bits a logit suffers most here, so these keep eight."""
        name = f"{stem}.weight"
        if self._quantization is None:
            return pack_bf16(self._tensor(name, shape))
        self._expect(name, shape)
        return pack_groups(self._source.groups(name) or quantise_q8(self._source.read(name)))

    def _groups(self, names: dict[str, tuple[int, int]]) -> list[Groups]:
        """Of several matrices, all in one form: that of the file where it is the wanted one, else quantised here."""
        for name, shape in names.items():
            self._expect(name, shape)
        four_bits = self._quantization == "w4a8"
        own = [self._source.groups(name) for name in names]
        ready = [each for each in own if each is not None and (each.m is not None) == four_bits]
        if len(ready) == len(own):
            return ready
        quantise = quantise_q4 if four_bits else quantise_q8
        return [quantise(self._source.read(name) if each is None else dequantise(each)) for name, each in zip(names, own, strict=True)]

    def vector(self, name: str, size: int) -> Tensor:
        return self._tensor(name, (size,)).float().contiguous()

    def optional(self, name: str, size: int) -> Tensor | None:
        return self.vector(name, size) if self._source.has(name) else None

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._expect(name, shape)
        return self._source.read(name).bfloat16()

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._source.shape(name)
        if found != shape:
            raise ModelError(f"tensor {name} has the shape {list(found)}; the configuration says {list(shape)}")


def _minimum(groups: Groups) -> Tensor:
    assert groups.m is not None
    return groups.m


def _joined(biases: list[Tensor | None], sizes: list[int]) -> Tensor | None:
    """One bias for fused matrices; zeros for those that have none."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat([torch.zeros(size) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)])
