"""Copying whole pages inside a KV pool.

    for (source, target) in order: pool[:, target] = pool[:, source]

pool [layers, pages, …], pages contiguous, any dtype.  bytes: 2 · pairs · layers · bytes of a page;  no operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.tiles import EVERYWHERE, Tile, TileRow, TileTable, architecture_of

WORDS = (torch.int32, torch.uint8)  # what pages are copied as: the first that divides a page
TILES = TileTable("copy_blocks", (TileRow(EVERYWHERE, WORDS, Tile(n=2048, warps=4)),))


@triton.jit
def copy_kernel(pool, pairs, layer_stride, page_stride, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (pair, BLOCK words of a page, layer): pairs first, of which a GPU's other axes take no more than 65,535."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair).to(tl.int64) * page_stride
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64) * page_stride
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    layer = pool + tl.program_id(2).to(tl.int64) * layer_stride
    tl.store(layer + target + word, tl.load(layer + source + word, mask=word < WORDS), mask=word < WORDS)


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy page `source` to page `target` in every layer, pair by pair in order. pool [layers, pages, …].

    One launch for each run of pairs of which none reads or writes what another writes; nearly always that is one.
    ValueError for a page that the pool does not have.
    """
    if not pairs:
        return
    if pool.ndim < 2:
        raise ValueError(f"pool: {list(pool.shape)}, wanted [layers, pages, …]")
    pages = pool.shape[1]
    for page in (page for pair in pairs for page in pair):
        if not 0 <= page < pages:
            raise ValueError(f"pairs: page {page} of a pool of {pages}")
    if not pool.numel():
        return
    words = _words(pool)
    tile = TILES.tile(architecture_of(pool.device), words.dtype)
    pinned = pool.device.type == "cuda"
    for run in independent_runs(pairs):
        told = torch.tensor(run, dtype=torch.int32, pin_memory=pinned).to(pool.device, non_blocking=True)
        copy_kernel[(len(run), triton.cdiv(words.shape[2], tile.n), words.shape[0])](
            words, told, words.stride(0), words.stride(1), WORDS=words.shape[2], BLOCK=tile.n, num_warps=tile.warps, num_stages=tile.stages
        )


def independent_runs(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in order, cut where one reads what an earlier one of its run writes, or writes what such a one reads or writes."""
    runs: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if not runs or source in written or target in written or target in read:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((source, target))
        read.add(source)
        written.add(target)
    return runs


def _words(pool: Tensor) -> Tensor:
    """pool as [layers, pages, words of a page]."""
    if not pool[0, 0].is_contiguous():
        raise ValueError(f"pool: pages of strides {pool.stride()[2:]} for {list(pool.shape[2:])}, wanted contiguous")
    size = pool[0, 0].numel()
    flat = pool.as_strided((pool.shape[0], pool.shape[1], size), (pool.stride(0), pool.stride(1), 1))
    for dtype in WORDS:
        if all(
            count * pool.element_size() % dtype.itemsize == 0 for count in (size, pool.stride(0), pool.stride(1), pool.storage_offset())
        ):
            return flat.view(dtype)
    raise AssertionError("bytes divide everything")
