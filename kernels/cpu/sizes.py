"""Which models the step in C++ computes, by their sizes."""

from __future__ import annotations

MULTIPLE = 32  # of every width: that of a group of quantised values, and of two registers
SCALE_BYTES = 2  # bfloat16, for a key or a value of one token and head in a pool of int8


def unfit(*, hidden: int, width: int, head_dim: int, block_size: int) -> str:
    """Why the step cannot compute a model of these sizes; '' when it can."""
    for name, value in (("hidden size", hidden), ("feed-forward width", width), ("head size", head_dim)):
        if value % MULTIPLE:
            return f"the {name} {value} is not a multiple of {MULTIPLE}"
    return f"the block size {block_size} is not a multiple of 16" if block_size % 16 else ""
