"""What each kernel must move and compute: the formulas of their docstrings, to be held against what they do.

Bytes count once, however many programs touch them: what a machine with a large enough cache would move. Indices (tables, slots, plans)
are left out: they are a few bytes a row. Operations are those of matrix products, 2 · M · N · K, where a kernel has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    bytes_moved: int
    operations: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes_moved + other.bytes_moved, self.operations + other.operations)


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer on one rank; `element` bytes of queries, `cached` bytes of an element of the cache."""

    heads: int
    kv_heads: int
    dim: int
    element: int = 2
    cached: int = 2

    @property
    def scale_bytes(self) -> int:
        """Of one token's key and value of one KV head."""
        return 8 if self.cached == 1 else 0


def rms_norm(tokens: int, hidden: int, element: int, delta: bool) -> Cost:
    return Cost(tokens * hidden * (8 + 2 * element if delta else 4 + element) + hidden * element)


def gate(tokens: int, width: int, element: int) -> Cost:
    """silu_mul and gelu_mul."""
    return Cost(3 * tokens * width * element)


def matmul(rows: int, columns: int, depth: int, element: int, bias: bool = False) -> Cost:
    moved = element * (rows * depth + columns * depth + rows * columns + (columns if bias else 0))
    return Cost(moved, 2 * rows * columns * depth)


def rope_kv_write(tokens: int, shape: Heads, norms: bool) -> Cost:
    """cosine and sine: one half each is read."""
    read = (shape.heads + 2 * shape.kv_heads) * shape.dim * shape.element + shape.dim * 4
    written = shape.heads * shape.dim * shape.element + shape.kv_heads * (2 * shape.dim * shape.cached + shape.scale_bytes)
    return Cost(tokens * (read + written) + (2 * shape.dim * shape.element if norms else 0))


def paged_attention(rows: Sequence[tuple[int, int]], shape: Heads, window: int | None, split: int) -> Cost:
    """`rows` (start, count) as in PagedBatch; those of several splits write and read their partial sums."""
    keys = pairs = partial = tokens = 0
    for start, count in rows:
        first = 0 if window is None else max(0, start + 1 - window)
        keys += start + count - first
        pairs += sum(min(start + i + 1, window or start + i + 1) for i in range(count))
        tokens += count
        splits = start // split - first // split + 1
        if count == 1 and splits > 1:
            partial += splits * shape.heads * (shape.dim + 1) * 4
    moved = (
        keys * shape.kv_heads * (2 * shape.dim * shape.cached + shape.scale_bytes) + 2 * tokens * shape.heads * shape.dim * shape.element
    )
    return Cost(moved + 2 * partial, 4 * pairs * shape.heads * shape.dim)


def copy_blocks(pairs: int, layers: int, page_bytes: int) -> Cost:
    return Cost(2 * pairs * layers * page_bytes)


def linear_quantized(rows: int, columns: int, depth: int, element: int, weight_bytes: int) -> Cost:
    """`weight_bytes` as stored. Sums over splits of K are left out: they live in the L2."""
    return Cost(weight_bytes + element * rows * (depth + columns), 2 * rows * columns * depth)


def sampling(rows: int, vocab: int, element: int) -> Cost:
    """Of rows without rules: the logits, however often they are passed over."""
    return Cost(rows * vocab * element)


def fused_moe(tokens: int, used: int, top_k: int, hidden: int, width: int, element: int) -> Cost:
    """`used`: how many experts get a token. What lies between the two products is written and read once."""
    weights = 3 * used * width * hidden * element
    between = 2 * tokens * top_k * (width + hidden) * element
    return Cost(weights + between + 2 * tokens * hidden * element, 6 * tokens * top_k * width * hidden)
