"""From files to a decoder in C++: weights read layer by layer and packed as kernels/cpu wants them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import CacheLayout
from kernels.cpu.decoder import Decoder, DecoderLayer, DecoderModel
from kernels.cpu.packed import Form, Groups, Kind, PackedMatrix, by_turns, dequantise, pack_bf16, pack_groups, quantise_q4, quantise_q8
from replica.config import Quantization
from replica.models.model_config import ModelConfig
from replica.models.packed_cache import PackedCache
from replica.models.rope import RotaryTable
from replica.models.tensors import EMBEDDING, HEAD, NORM
from replica.models.weight_source import WeightSource

_KINDS: Mapping[Quantization | None, Kind] = {None: Kind.BF16, "w8a8": Kind.Q8, "w4a8": Kind.Q4}


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """What a decoder is given beside its weights."""

    library: ctypes.CDLL
    layout: CacheLayout
    pool: Tensor
    rope: RotaryTable
    threads: int
    quantization: Quantization | None = None  # None: bfloat16
    cache: PackedCache | None = None


def load_decoder(config: ModelConfig, source: WeightSource, placement: CpuPlacement) -> Decoder:
    """At most one layer exists twice at a time. Tensors that are missing or misshapen were refused before (models.tensors)."""
    read = _Reader(source, placement.quantization, placement.cache)
    layers = tuple(_layer(config, read, index) for index in range(config.num_layers))
    embedding = read.vocabulary(EMBEDDING)
    cosine, sine = placement.rope.halves()
    model = DecoderModel(
        heads=config.num_heads,
        layers=layers,
        embedding=embedding,
        norm=read.vector(f"{NORM}.weight"),
        head=embedding if config.tied_embeddings else read.vocabulary(HEAD),
        epsilon=config.norm_epsilon,
        attention_scale=config.head_dim**-0.5,
        cosine=cosine,
        sine=sine,
    )
    return Decoder(placement.library, model, placement.layout, placement.pool, placement.threads)


def _layer(config: ModelConfig, read: _Reader, index: int) -> DecoderLayer:
    stem = f"model.layers.{index}"
    attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
    return DecoderLayer(
        attention_norm=read.vector(f"{stem}.input_layernorm.weight"),
        qkv=read.matrix(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj", bias=config.qkv_bias),
        out=read.matrix(f"{attention}.o_proj", bias=config.output_bias),
        feed_forward_norm=read.vector(f"{stem}.post_attention_layernorm.weight"),
        gate_up=read.gated(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
        down=read.matrix(f"{mlp}.down_proj", bias=config.mlp_bias),
        query_norm=read.vector(f"{attention}.q_norm.weight") if config.head_norms else None,
        key_norm=read.vector(f"{attention}.k_norm.weight") if config.head_norms else None,
        window=config.layer_windows[index] or 0,
    )


class _Reader:
    """Reads tensors and packs them: bfloat16, or quantised by groups of 32 of a row."""

    def __init__(self, source: WeightSource, quantization: Quantization | None, cache: PackedCache | None) -> None:
        self._source = source
        self._quantization = quantization
        self._cache = cache

    def matrix(self, *stems: str, bias: bool) -> PackedMatrix:
        """Several matrices, one below the other."""
        return self._kept(stems, bias, lambda: self._packed(stems, torch.cat, bias))

    def gated(self, *stems: str, bias: bool) -> PackedMatrix:
        """Two matrices, their rows by turns."""
        return self._kept(stems, bias, lambda: self._packed(stems, lambda parts: by_turns(*parts), bias))

    def vocabulary(self, stem: str) -> PackedMatrix:
        """Embedding and head: with four bits a logit suffers most here, so these keep eight."""
        name = f"{stem}.weight"
        if self._quantization is None:
            return self._kept([stem], False, lambda: pack_bf16(self._source.read(name).bfloat16()))
        quantised = (Kind.Q8, Kind.Q4)  # whichever the file has
        return self._kept([stem], False, lambda: pack_groups(self._source.groups(name) or quantise_q8(self._source.read(name))), quantised)

    def vector(self, name: str) -> Tensor:
        """Rounded to bfloat16, as in every dtype that is served beside float32."""
        return self._source.read(name).bfloat16().float().contiguous()

    def _kept(
        self, stems: Sequence[str], bias: bool, make: Callable[[], PackedMatrix], kinds: tuple[Kind, ...] | None = None
    ) -> PackedMatrix:
        if self._cache is None:
            return make()
        shapes = [self._source.shape(f"{stem}.weight") for stem in stems]
        form = Form(kinds or (_KINDS[self._quantization],), sum(shape[0] for shape in shapes), shapes[0][1], bias)
        return self._cache.get(stems[0], form, make)

    def _packed(self, stems: Sequence[str], join: Callable[[list[Tensor]], Tensor], has_bias: bool) -> PackedMatrix:
        names = [f"{stem}.weight" for stem in stems]
        bias = join([self.vector(f"{stem}.bias") for stem in stems]) if has_bias else None
        if self._quantization is None:
            return pack_bf16(join([self._source.read(name).bfloat16() for name in names]), bias)
        parts = self._groups(names)
        minima = [part.m for part in parts if part.m is not None]
        joined = Groups(join([part.q for part in parts]), join([part.d for part in parts]), join(minima) if minima else None)
        return pack_groups(joined, bias)

    def _groups(self, names: list[str]) -> list[Groups]:
        """All in one form: each that the file has in it as it stands, the others quantised here."""
        four_bits = self._quantization == "w4a8"
        quantise = quantise_q4 if four_bits else quantise_q8
        found: list[Groups] = []
        for name in names:
            own = self._source.groups(name)
            is_ready = own is not None and (own.m is not None) == four_bits
            found.append(own if own is not None and is_ready else quantise(self._source.read(name) if own is None else dequantise(own)))
        return found
