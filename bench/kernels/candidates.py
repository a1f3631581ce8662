"""Tiles that a table does not have and might: what the bench measures beside those that serve."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.triton import attention_tiles, matmul_batch_invariant, rms_norm, rope_kv_write, silu_mul
from kernels.triton.tiles import Tile, TileTable

SPLITS = tuple(Tile(m=16, n=n, split=split, warps=4, stages=stages) for n in (32, 64, 128) for split in (256, 512) for stages in (2, 3))
CHUNKS = tuple(Tile(m=m, n=n, warps=w, stages=s) for m, n, w in ((64, 64, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4)) for s in (2, 3))
PRODUCTS = tuple(Tile(m=m, n=n, k=64, warps=w, stages=s) for m, n, w in ((128, 128, 8), (128, 256, 8), (64, 128, 4)) for s in (3, 4))
# kernel → what is tried, and the first words of the shapes it is tried on
CANDIDATES: dict[str, tuple[TileTable, tuple[Tile, ...], tuple[str, ...]]] = {
    "rms_norm": (rms_norm.TILES, tuple(Tile(warps=w) for w in (2, 4, 8, 16)), ("T32 ", "T2048 ")),
    "silu_mul": (silu_mul.TILES, tuple(Tile(n=n, warps=w) for n in (512, 1024, 2048, 4096) for w in (4, 8)), ("T32 ", "T2048 ")),
    "rope_kv_write": (rope_kv_write.TILES, tuple(Tile(m=m, warps=w) for m in (4, 8, 16, 64) for w in (2, 4, 8)), ("T32 ", "T2048 ")),
    "matmul_batch_invariant": (matmul_batch_invariant.TILES, PRODUCTS, ("M32 ", "M8192 ")),
    "paged_attention decode": (attention_tiles.SPLIT_TILES, SPLITS, ("8×(4095,1)", "64×(4095,1)")),
    "paged_attention prefill": (attention_tiles.CHUNK_TILES, CHUNKS, ("1×(0,8192)", "1×(6144,2048)")),
}


def tried_on(kernel: str, shape: str) -> Iterator[tuple[TileTable, Tile]]:
    """What to try for a subject of `kernel` and `shape`."""
    for name, (table, tiles, shapes) in CANDIDATES.items():
        if name.partition(" ")[0] == kernel and shape.startswith(shapes):
            for tile in tiles:
                yield table, tile
