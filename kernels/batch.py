"""What operators must know of a packed batch, of the cache they work on, and of the model. Host values only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]
HOST_ONLY = "host_only"  # metadata of a plan's field that is looked at before a launch and never in one: a graph replays without it


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One layer's pages: [pages, 2, kv_heads, block_size, head_dim], keys at [:, 0] and values at [:, 1]. Head-major, so that
    the tokens of one head lie together.

        page ─┬─ keys   ─ head 0: token 0 … token 15 │ head 1: … │ …
              └─ values ─ head 0: token 0 … token 15 │ head 1: … │ …
    """

    kv_heads: int
    block_size: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """R rows, their new tokens packed one after the other into T = Σ counts.

    Row r computes positions starts[r] … starts[r] + counts[r] - 1; position p lies in page tables[r, p // block_size], at
    p % block_size. Behind a row's last page `tables` repeats the row's own first: what is padded is masked, but 0 · NaN is NaN,
    and a row must never be able to spoil another.

    With `recurring` a step of such a batch is recorded and replayed by later ones: the lists that a plan makes of it are padded
    to lengths of which R and the width of the tables leave few.
    """

    starts: Int32  # [R]
    counts: Int32  # [R], each ≥ 1
    tables: Int32  # [R, most pages of a row]
    recurring: bool = False

    @property
    def positions(self) -> Int32:
        """[T] position of every packed token in its sequence."""
        first = np.cumsum(self.counts, dtype=np.int32) - self.counts
        inside = np.arange(int(self.counts.sum()), dtype=np.int32) - np.repeat(first, self.counts)
        return np.repeat(self.starts, self.counts) + inside


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What decides, before anything is loaded, whether kernels serve a model: one rank's part of it."""

    dtype: torch.dtype  # of weights, activations and cache
    hidden: int
    width: int  # of the feed-forward layer, or of one expert
    head_dim: int
    experts: int = 0
    quantized: bool = False  # the layers' matrices
    batch_invariant: bool = False
