"""An attention plan as an operator of torch can take it: tensors and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kernels.batch import HOST_ONLY, CacheLayout
from kernels.triton.attention_plan import AttentionPlan, Chunks, Decodes


@dataclass(frozen=True, slots=True)
class PlanValues:
    tensors: list[Tensor]
    shape: list[int]  # what launches are made from; window 0: none
    page_limit: int = field(metadata={HOST_ONLY: True})

    @property
    def numbers(self) -> list[int]:
        return [*self.shape, self.page_limit]


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
        [layout.kv_heads, layout.block_size, layout.head_dim, plan.window or 0, decodes.split_tokens, chunks.tokens],
        plan.page_limit,
    )


def from_values(tensors: Sequence[Tensor], numbers: Sequence[int]) -> AttentionPlan:
    starts, ends, tables, slots, rows, indices, reduced_rows, reduced_firsts, chunk_rows, chunk_firsts = tensors
    kv_heads, block_size, head_dim, window, split_tokens, chunk_tokens, page_limit = numbers
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
