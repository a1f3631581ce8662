"""Pages of keys and values as the C++ step keeps them (drawn in attention.h): in bfloat16, or in int8 with a scale for each."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.batch import CacheLayout
from kernels.cpu.sizes import SCALE_BYTES

_TILE = 16  # tokens whose keys, values and scales lie together


def pool_shape(layers: int, pages: int, layout: CacheLayout, dtype: torch.dtype) -> tuple[int, ...]:
    """Of a pool of `dtype`, bfloat16 or int8: bytes, pages and layers are where the shape says; inside a page only the step knows."""
    return layers, pages, 2, layout.kv_heads, layout.block_size, layout.head_dim + (SCALE_BYTES if dtype is torch.int8 else 0)


def scrub(pool: Tensor, pages: list[int]) -> None:
    """What is not finite in these pages becomes 0, in place. In int8 only a scale can be so."""
    if pool.dtype is not torch.int8:
        pool[:, pages] = torch.nan_to_num(pool[:, pages], nan=0.0, posinf=0.0, neginf=0.0)
        return
    layers, _, sides, heads, block, width = pool.shape
    tiles = pool[:, pages].view(layers, len(pages), heads * block // _TILE, sides * _TILE * width)
    scales = tiles[..., -sides * _TILE * SCALE_BYTES :].contiguous().view(torch.bfloat16)
    tiles[..., -sides * _TILE * SCALE_BYTES :] = torch.nan_to_num(scales, nan=0.0, posinf=0.0, neginf=0.0).view(torch.int8)
    pool[:, pages] = tiles.view(layers, len(pages), sides, heads, block, width)
