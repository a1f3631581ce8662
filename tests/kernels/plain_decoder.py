"""What the C++ step is to compute, in a few lines of torch: one sequence at a time, no cache, float64 sums."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.batch import CacheLayout, PagedBatch
from kernels.cpu.abi import load_library
from kernels.cpu.build import CannotBuild, Isa, best_library, cache_directory, library_path
from kernels.cpu.decoder import Computed, Decoder, DecoderLayer, DecoderModel
from kernels.cpu.packed import Groups, PackedMatrix, by_turns, dequantise, pack_bf16, pack_groups, quantise_q4, quantise_q8
from kernels.cpu.pages import pool_shape

BLOCK = 16
POSITIONS = 300


@dataclass(frozen=True)
class Sizes:
    hidden: int = 64
    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    width: int = 96
    vocab: int = 132  # not a multiple of 32: the last rows are padding
    layers: int = 2
    kind: str = "bf16"  # or q8, q4
    bias: bool = False
    head_norms: bool = False
    windows: tuple[int, ...] = (0, 0)
    tied: bool = True
    int8_cache: bool = False
    sharpness: float = 1.0  # of attention: what its scores are multiplied by, beside the usual scale


@dataclass(frozen=True)
class Plain:
    """The same model twice: packed for the step, and as the matrices it means."""

    sizes: Sizes
    model: DecoderModel
    matrices: dict[str, Tensor]  # float64, as dequantised
    vectors: dict[str, Tensor]


def build(sizes: Sizes, seed: int = 0) -> Plain:
    generator = torch.Generator().manual_seed(seed)
    matrices: dict[str, Tensor] = {}
    vectors: dict[str, Tensor] = {}

    def vector(name: str, size: int) -> Tensor:
        vectors[name] = torch.rand(size, generator=generator) + 0.5
        return vectors[name]

    def matrix(name: str, rows: int, columns: int, *, gated: bool = False) -> PackedMatrix:
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        bias = vector(f"{name}.bias", rows) if sizes.bias and name != "embedding" and name != "head" else None
        arranged = by_turns(*values.chunk(2)) if gated else values
        turned = by_turns(*bias.chunk(2)) if gated and bias is not None else bias
        if sizes.kind == "bf16":
            matrices[name] = values.bfloat16().double()
            return pack_bf16(arranged, turned)
        quantise = quantise_q8 if sizes.kind == "q8" else quantise_q4
        matrices[name] = dequantise(quantise(values)).double()
        groups: Groups = quantise(arranged)
        return pack_groups(groups, turned)

    query, kv = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
    layers = tuple(
        DecoderLayer(
            attention_norm=vector(f"{i}.attention_norm", sizes.hidden),
            qkv=matrix(f"{i}.qkv", query + 2 * kv, sizes.hidden),
            out=matrix(f"{i}.out", sizes.hidden, query),
            feed_forward_norm=vector(f"{i}.feed_forward_norm", sizes.hidden),
            gate_up=matrix(f"{i}.gate_up", 2 * sizes.width, sizes.hidden, gated=True),
            down=matrix(f"{i}.down", sizes.hidden, sizes.width),
            query_norm=vector(f"{i}.query_norm", sizes.dim) if sizes.head_norms else None,
            key_norm=vector(f"{i}.key_norm", sizes.dim) if sizes.head_norms else None,
            window=sizes.windows[i],
        )
        for i in range(sizes.layers)
    )
    embedding = matrix("embedding", sizes.vocab, sizes.hidden)
    head = embedding if sizes.tied else matrix("head", sizes.vocab, sizes.hidden)
    if sizes.tied:
        matrices["head"] = matrices["embedding"]
    angles = torch.arange(POSITIONS).double()[:, None] / 100 ** (torch.arange(sizes.dim // 2) / (sizes.dim // 2))
    cosine, sine = angles.cos().float(), angles.sin().float()
    model = DecoderModel(
        sizes.heads, layers, embedding, vector("norm", sizes.hidden), head, 1e-5, sizes.dim**-0.5 * sizes.sharpness, cosine, sine
    )
    return Plain(sizes, model, matrices, vectors)


def logits_of(plain: Plain, tokens: list[int]) -> Tensor:
    """[len(tokens), vocabulary] float64."""
    s, count = plain.sizes, len(tokens)
    x = plain.matrices["embedding"][tokens]
    positions = torch.arange(count)
    cosine, sine = plain.model.cosine[:count, None].double(), plain.model.sine[:count, None].double()

    def norm(values: Tensor, name: str) -> Tensor:
        return values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * plain.vectors[name].double()

    def linear(values: Tensor, name: str) -> Tensor:
        bias = plain.vectors.get(f"{name}.bias")
        return values @ plain.matrices[name].T + (0 if bias is None else bias.double())

    def turned(heads: Tensor) -> Tensor:
        a, b = heads.chunk(2, dim=-1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)

    for i in range(s.layers):
        q, k, v = linear(norm(x, f"{i}.attention_norm"), f"{i}.qkv").split(
            [s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim], dim=-1
        )
        q, k, v = (part.view(count, -1, s.dim) for part in (q, k, v))
        if s.head_norms:
            q, k = norm(q, f"{i}.query_norm"), norm(k, f"{i}.key_norm")
        q, k = turned(q), turned(k)
        k, v = (part.repeat_interleave(s.heads // s.kv_heads, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * s.dim**-0.5 * s.sharpness
        distance = positions[:, None] - positions
        hidden_keys = (distance < 0) | ((distance >= s.windows[i]) if s.windows[i] else torch.zeros_like(distance, dtype=torch.bool))
        weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
        x = x + linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{i}.out")
        gate, up = linear(norm(x, f"{i}.feed_forward_norm"), f"{i}.gate_up").chunk(2, dim=-1)
        x = x + linear(torch.nn.functional.silu(gate) * up, f"{i}.down")
    return norm(x, "norm") @ plain.matrices["head"].T


def library_or_reason(isa: str = "") -> tuple[Isa | None, str]:
    """The instructions that a library is to be had for here, else why there is none."""
    try:
        return best_library(cache_directory(), isa)[0], ""
    except CannotBuild as error:
        return None, str(error)


class Sequences:
    """A decoder with its pool, and sequences that own pages of it, scattered at random."""

    def __init__(self, plain: Plain, isa: Isa, *, threads: int = 2, pages: int = 128) -> None:
        s = plain.sizes
        dtype, layout = torch.int8 if s.int8_cache else torch.bfloat16, CacheLayout(s.kv_heads, BLOCK, s.dim)
        shape = pool_shape(s.layers, pages, layout, dtype)
        self.pool = torch.frombuffer(mmap.mmap(-1, dtype.itemsize * math.prod(shape)), dtype=dtype).view(shape)  # zeros, not yet touched
        library = load_library(library_path(isa, cache_directory()))
        self.decoder = Decoder(library, plain.model, layout, self.pool, threads)
        self._free = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()

    def spoil(self, pages: list[int]) -> None:
        """NaN in all that can be."""
        self.pool[:, pages] = -1 if self.pool.dtype is torch.int8 else float("nan")

    def table(self) -> list[int]:
        return [self._free.pop() for _ in range(POSITIONS // BLOCK)]

    def step(self, rows: list[tuple[list[int], int, list[int]]], wanted: list[int] | None = None) -> Computed:
        """rows of (new tokens, start, table); all logits unless `wanted` places are given."""
        ids = np.array([token for tokens, _, _ in rows for token in tokens], np.int64)
        batch = PagedBatch(
            np.array([start for _, start, _ in rows], np.int32),
            np.array([len(tokens) for tokens, _, _ in rows], np.int32),
            np.array([table for _, _, table in rows], np.int32),
        )
        return self.decoder.step(ids, batch, np.arange(ids.size, dtype=np.int32) if wanted is None else np.array(wanted, np.int32))
