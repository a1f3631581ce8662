"""An attention plan as an operator of torch can take it: tensors and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.batch import CacheLayout
from kernels.triton.attention_plan import AttentionPlan, Chunks, Decodes


@dataclass(frozen=True, slots=True)
class PlanValues:
    tensors: list[Tensor]
    numbers: list[int]  # window 0: none


def to_values(plan: AttentionPlan) -> PlanValues:
    decodes, chunks, layout = plan.decodes, plan.chunks, plan.layout
    return PlanValues(
        [
            plan.starts,
            plan.cu_query_lengths,
            plan.tables,
            plan.slots,
            decodes.rows,
            decodes.indices,
            decodes.reduced_rows,
            decodes.reduced_firsts,
            chunks.rows,
            chunks.firsts,
        ],
        [layout.kv_heads, layout.block_size, layout.head_dim, plan.window or 0, plan.page_limit, decodes.split_tokens, chunks.tokens],
    )


def from_values(tensors: Sequence[Tensor], numbers: Sequence[int]) -> AttentionPlan:
    starts, ends, tables, slots, rows, indices, reduced_rows, reduced_firsts, chunk_rows, chunk_firsts = tensors
    kv_heads, block_size, head_dim, window, page_limit, split_tokens, chunk_tokens = numbers
    return AttentionPlan(
        CacheLayout(kv_heads, block_size, head_dim),
        window or None,
        page_limit,
        starts,
        ends,
        tables,
        slots,
        Decodes(split_tokens, rows, indices, reduced_rows, reduced_firsts),
        Chunks(chunk_rows, chunk_firsts, chunk_tokens),
    )
