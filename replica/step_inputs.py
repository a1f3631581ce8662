"""A step as arrays: what the model computes, which rows draw, which positions are scored."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from kernels.batch import PagedBatch
from replica.step import Step

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of R rows, packed in the order of Step.rows."""

    token_ids: Int64  # [T]
    positions: Int64  # [T]
    batch: PagedBatch
    drawing: tuple[int, ...]  # rows that draw
    quiet: tuple[int, ...]  # the others
    first_tokens: Int64  # [R] place of every row's first token in the packed batch
    last_tokens: Int64  # [R] of its last one


def build_inputs(step: Step, block_size: int) -> StepInputs:
    """Only as many pages of a row are taken as its positions need. A step has at least one row, a row at least one token."""
    rows = step.rows
    counts = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    pages = -(-(starts + counts) // block_size)
    total = int(counts.sum())
    token_ids = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, total)
    needed = zip(rows, pages.tolist(), strict=True)
    flat = np.fromiter(chain.from_iterable(islice(row.blocks, count) for row, count in needed), np.int32, int(pages.sum()))
    tables = np.empty((len(rows), int(pages.max())), np.int32)
    tables[:] = flat[np.cumsum(pages) - pages][:, None]
    tables[np.arange(tables.shape[1]) < pages[:, None]] = flat
    drawing = tuple(index for index, row in enumerate(rows) if row.draw is not None)
    quiet = tuple(index for index, row in enumerate(rows) if row.draw is None)
    return pack_inputs(token_ids, PagedBatch(starts, counts, tables), drawing, quiet)


def pack_inputs(token_ids: Int64, batch: PagedBatch, drawing: tuple[int, ...], quiet: tuple[int, ...]) -> StepInputs:
    """The places of tokens follow from the batch. `drawing` and `quiet` are its rows, each in one of them."""
    if token_ids.size == batch.counts.size:  # one token a row
        places = np.arange(token_ids.size)
        return StepInputs(token_ids, batch.starts.astype(np.int64), batch, drawing, quiet, places, places)
    last = np.cumsum(batch.counts, dtype=np.int64) - 1
    return StepInputs(token_ids, batch.positions.astype(np.int64), batch, drawing, quiet, last - batch.counts + 1, last)
