"""Copying whole pages inside a KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy page `source` to page `target` in every layer, pair by pair in order. pool [layers, pages, …]."""
    if not pairs:
        return
    sources, targets = zip(*pairs, strict=True)
    independent = len(set(targets)) == len(targets) and not set(sources) & set(targets)
    if independent:
        pool[:, list(targets)] = pool[:, list(sources)]
        return
    for source, target in pairs:  # one reads what another wrote: their order is part of the meaning
        pool[:, target] = pool[:, source]
