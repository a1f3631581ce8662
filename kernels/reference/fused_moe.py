"""A feed-forward layer of experts: each token goes to its top-k, whose results are added with the router's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.silu_mul import silu_mul


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """softmax over the experts, then the k largest, of equals the first: weights [T, k] and experts [T, k] int32, the largest first.

    `renormalize`: the k weights of a token add up to 1.
    """
    exact = torch.float64 if router_logits.dtype is torch.float64 else torch.float32
    shares = router_logits.to(exact).softmax(-1)
    experts = torch.argsort(shares, dim=-1, descending=True, stable=True)[:, :top_k]
    weights = shares.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.int()


def fused_moe(hidden: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool = True) -> Tensor:
    """Σ_slots weight · down[e] · (silu(gate) · up), (gate | up) = gate_up[e] · hidden, e the expert of the slot; returns [T, H].

    hidden [T, H], router_logits [T, E], gate_up [E, 2·I, H], down [E, H, I].
    """
    weights, experts = route(router_logits, top_k, renormalize)
    out = torch.zeros(hidden.shape, dtype=weights.dtype, device=hidden.device)
    for expert in sorted(set(experts.flatten().tolist())):
        tokens, slots = torch.nonzero(experts == expert, as_tuple=True)
        activated = silu_mul(hidden[tokens] @ gate_up[expert].T)
        result = (activated @ down[expert].T).to(weights.dtype)
        out.index_add_(0, tokens, result * weights[tokens, slots][:, None])
    return out.to(hidden.dtype)
