"""Run by test_cpu_sanitized in its own process, the address sanitizer loaded first: says `checked`, and then dies of what is not."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

import kernels.cpu.decoder as decoder
from kernels.batch import CacheLayout, PagedBatch
from kernels.cpu.abi import DRAW, ModelC, load_library
from kernels.cpu.pages import pool_shape
from tests.kernels.plain_decoder import BLOCK, POSITIONS, Sizes, build

PAGES = 24


def run(library: str, *, legal: bool) -> None:
    for sizes in (
        Sizes(int8_cache=True),
        Sizes(kind="q8", bias=True),
        Sizes(kind="q4", tied=False),
        Sizes(head_norms=True, dim=64, windows=(20, 0)),
    ):
        dtype, layout = torch.int8 if sizes.int8_cache else torch.bfloat16, CacheLayout(sizes.kv_heads, BLOCK, sizes.dim)
        pool = torch.zeros(pool_shape(sizes.layers, PAGES, layout, dtype), dtype=dtype)
        made = decoder.Decoder(load_library(Path(library)), build(sizes).model, layout, pool, 2)
        if legal:
            rows = [(1, 0, [23]), (15, 1, [0, 5]), (1, 63, [1, 2, 3, 4]), (70, 30, list(range(6, 13))), (2, POSITIONS - 2, list(range(19)))]
            draw_from(made, made.step(*batch_of(rows)).logits.numpy())
        bad = [[(1, 0, [PAGES])], [(1, 0, [-1])], [(1, BLOCK, [0])], [(1, POSITIONS, list(range(20)))]]
        for rows in bad:
            try:
                made.step(*batch_of(rows))
            except decoder.StepFault:
                continue
            raise SystemExit(f"accepted {rows}")


def draw_from(made: decoder.Decoder, logits: np.ndarray) -> None:
    """With every filter; the last row ends where the memory does."""
    last = logits.shape[0] - 1
    asked = [
        (last, 1, 7, 0, i, k, 1.0, p, least, logits[last, 1])
        for i, (k, p, least) in enumerate(product((0, 3, 131), (1.0, 0.9), (0.0, 0.01)))
    ]
    assert made.draw(logits, np.array(asked, DRAW)).max() < logits.shape[1]


def batch_of(rows: list[tuple[int, int, list[int]]]) -> tuple[np.ndarray, PagedBatch, np.ndarray]:
    """(tokens, start, pages) each; every logit is wanted."""
    width = max(len(pages) for _, _, pages in rows)
    tables = np.array([pages + pages[:1] * (width - len(pages)) for _, _, pages in rows], np.int32)
    counts = np.array([count for count, _, _ in rows], np.int32)
    total = int(counts.sum())
    batch = PagedBatch(np.array([start for _, start, _ in rows], np.int32), counts, tables)
    return np.arange(total, dtype=np.int64) % 132, batch, np.arange(total, dtype=np.int32)


if __name__ == "__main__":
    run(sys.argv[1], legal=True)
    print("checked", flush=True)  # noqa: T201
    # the kernel is told of more pages than there are: what its check keeps out then comes through
    decoder.ModelC = lambda *values: ModelC(*values[:12], 10**6, *values[13:])  # type: ignore[assignment, misc]
    run(sys.argv[1], legal=False)
    print("unchecked")  # noqa: T201
