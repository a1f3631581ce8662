"""Which experts a token goes to, and the tokens of every expert one after the other. Nothing waits for the host.

    route   a program a token: softmax, top-k             weights, experts [T, k]
    count   a program an expert                           counts [E]
    place   a program an expert (and one for the rest)    entries, block_experts

Entry t · k + slot stands for a token's slot. `entries` lists those of expert 0, then those of expert 1, …, each in ascending order
and padded with T · k to whole blocks of BLOCK_M rows; block_experts names the expert of each block, -1 behind the last. How many
blocks there are is known on the device alone; the host provides for the most: ⌈T · k / BLOCK_M⌉ + min(E, T · k).
Bytes: T · E of logits, E · T · k · 8 of indices that stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import rows_of

EXPERTS_MAX = 1024
SCAN = 1024  # entries looked at together


@dataclass(frozen=True, slots=True)
class Routing:
    weights: Tensor  # [T, k] float32
    entries: Tensor  # [blocks · BLOCK_M] int32
    block_experts: Tensor  # [blocks] int32


@triton.jit
def route_kernel(weights, chosen, logits, experts, top_k, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr):
    """Grid: (T,). A token with NaN goes to some experts of its own right, with NaN for weights."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    raw = tl.load(logits + row * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    x = tl.where(raw == raw, raw, float("-inf"))
    total = tl.sum(tl.exp(raw - tl.max(x, axis=0)), axis=0)
    shares = tl.exp(x - tl.max(x, axis=0)) / total
    free = expert < experts
    values = tl.zeros((SLOTS,), dtype=tl.float32)
    ids = tl.zeros((SLOTS,), dtype=tl.int32)
    for index in range(top_k):
        # By logits, not by shares: those of unlikely experts are 0 alike.
        largest = tl.max(tl.where(free, x, float("-inf")), axis=0)
        best = tl.min(tl.where(free & (x == largest), expert, EXPERTS), axis=0)
        values = tl.where(slot == index, tl.sum(tl.where(expert == best, shares, 0.0), axis=0), values)
        ids = tl.where(slot == index, best, ids)
        free = free & (expert != best)
    if RENORMALIZE:
        values = values / tl.sum(tl.where(slot < top_k, values, 0.0), axis=0)
    tl.store(weights + row * top_k + slot, values, mask=slot < top_k)
    tl.store(chosen + row * top_k + slot, ids, mask=slot < top_k)


@triton.jit(do_not_specialize=["size"])
def count_kernel(counts, chosen, size, SCAN: tl.constexpr):
    """Grid: (E,)."""
    total = tl.zeros((SCAN,), dtype=tl.int32)
    for start in range(0, size, SCAN):
        at = start + tl.arange(0, SCAN)
        total += (tl.load(chosen + at, mask=at < size, other=-1) == tl.program_id(0)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["size", "blocks"])
def place_kernel(
    entries, block_experts, counts, chosen, size, experts, blocks, SCAN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Grid: (E + 1,). The last program marks the blocks that nobody needs."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    counted = tl.load(counts + expert, mask=expert < experts, other=0)
    needed = tl.cdiv(counted, BLOCK_M)
    first = tl.sum(tl.where(expert < own, needed, 0), axis=0)
    mine = tl.sum(tl.where(expert == own, counted, 0), axis=0)
    last = tl.where(own < experts, first + tl.cdiv(mine, BLOCK_M), blocks)
    name = tl.where(own < experts, own, -1)
    for start in range(first, last, SCAN):
        block = start + tl.arange(0, SCAN)
        tl.store(block_experts + block, tl.zeros((SCAN,), tl.int32) + name, mask=block < last)
    if own < experts:
        behind = first * BLOCK_M + mine + tl.arange(0, BLOCK_M)
        tl.store(entries + behind, tl.zeros((BLOCK_M,), tl.int32) + size, mask=behind < last * BLOCK_M)
        if mine > 0:
            place = first * BLOCK_M
            for start in range(0, size, SCAN):
                at = start + tl.arange(0, SCAN)
                hit = (tl.load(chosen + at, mask=at < size, other=-1) == own).to(tl.int32)
                tl.store(entries + place + tl.cumsum(hit, axis=0) - 1, at, mask=hit > 0)
                place += tl.sum(hit, axis=0)


def route_tokens(router_logits: Tensor, top_k: int, renormalize: bool, block_rows: int) -> Routing:
    """router_logits [T, E] contiguous, T ≥ 1; blocks of `block_rows`, a power of two. ValueError."""
    tokens, experts = rows_of("router_logits", router_logits)
    if not 0 < top_k <= experts <= EXPERTS_MAX:
        raise ValueError(f"top_k: {top_k} of {experts} experts, wanted 1 to that many, and {EXPERTS_MAX} experts at most")
    size, device = tokens * top_k, router_logits.device
    blocks = triton.cdiv(size, block_rows) + min(experts, size)
    padded = max(16, triton.next_power_of_2(experts))
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    entries = torch.empty(blocks * block_rows, dtype=torch.int32, device=device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=device)
    slots = triton.next_power_of_2(top_k)
    route_kernel[(tokens,)](
        weights, chosen, router_logits, experts, top_k, RENORMALIZE=renormalize, EXPERTS=padded, SLOTS=slots, num_warps=1
    )
    count_kernel[(experts,)](counts, chosen, size, SCAN=SCAN, num_warps=4)
    place_kernel[(experts + 1,)](
        entries, block_experts, counts, chosen, size, experts, blocks, SCAN=SCAN, EXPERTS=padded, BLOCK_M=block_rows, num_warps=4
    )
    return Routing(weights, entries, block_experts)
