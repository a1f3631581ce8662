"""One token a row from logits [R, V], V ≤ 262,144, with everything a request may ask: the meaning is kernels/reference/sampling.py.

A fixed sequence of launches, none of which waits for the host, whatever the rows ask (what a row does not ask, its programs skip):

    rules → state (a program a row) → histogram → gather → choose (a program a row) → draw → finish (a program a row) [→ top n]

Kernels that are not "a program a row" have one for each chunk of 4,096 logits: the split depends on V alone, every sum is made in
one order or in integers, and so a row's token is the same bits in every company. Randomness is that of kernels/reference/noise.py.
Bytes a row, s those of a logit, if no cache helps: V · s, again for a drawn row without top-k and top-p, or twice for one with them;
rules write and read a copy (4 · V) and read V / 8 for a mask and 4 · V for counts. Bound by bandwidth and, in small batches, launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.reference.sampling import Sampled, SamplingRows
from kernels.triton.arguments import rows_of
from kernels.triton.sampling_arguments import check_sampling
from kernels.triton.sampling_draw import draw_kernel, finish_kernel
from kernels.triton.sampling_filters import choose_kernel, gather_kernel, histogram_kernel
from kernels.triton.sampling_rules import rules_kernel, state_kernel
from kernels.triton.tiles import EVERYWHERE, FLOATS, Tile, TileRow, TileTable, architecture_of
from kernels.triton.top_logprobs import top_join_kernel, top_parts_kernel

TILES = TileTable("sampling", (TileRow(EVERYWHERE, FLOATS, Tile(n=4096, warps=8), 1 << 18),))
CHOOSE_TILES = TileTable("sampling, choose", (TileRow(EVERYWHERE, FLOATS, Tile(n=2048, warps=8), 1 << 18),))
BINS = 256
ENTRIES = 32  # bans written at a time


@dataclass(frozen=True, slots=True)
class _Launch:
    """What every launch of one call shares."""

    logits: Tensor
    rows: SamplingRows
    work: Tensor  # logits under the rules; `logits` itself where no row has any
    grid: tuple[int, int]  # R, chunks
    padded_chunks: int
    statuses: Tensor
    bests: Tensor
    best_tokens: Tensor
    normalizers: Tensor
    tile: Tile

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)


def sampling(logits: Tensor, rows: SamplingRows, top_logprobs: int = 0) -> Sampled:
    """One token for each row of logits [R, V] (float32, float16 or bfloat16, contiguous); all tensors on one device.

    `top_logprobs` n ≤ V likeliest tokens of every row. The outputs of a row whose status is not FINE mean nothing.
    ValueError where shapes do not fit, TypeError for another dtype; KernelError where no tile serves.
    """
    count, vocab = rows_of("logits", logits)
    check_sampling(logits, rows, top_logprobs)
    tile = TILES.tile(architecture_of(logits.device), logits.dtype, vocab)
    asks = any(each is not None for each in (rows.allowed, rows.prompt_seen, rows.output_counts, rows.bias, rows.banned))
    chunks = triton.cdiv(vocab, tile.n)

    def row_values(dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=logits.device)

    launch = _Launch(
        logits,
        rows,
        torch.empty((count, vocab), dtype=torch.float32, device=logits.device) if asks else logits,
        (count, chunks),
        triton.next_power_of_2(chunks),
        row_values(torch.int32),
        row_values(torch.float32),
        row_values(torch.int32),
        row_values(torch.float32),
        tile,
    )
    tokens, logprobs = row_values(torch.int64), row_values(torch.float32)
    top_tokens = launch.empty(count, top_logprobs, dtype=torch.int64)
    top_values = launch.empty(count, top_logprobs, dtype=torch.float32)
    if count:
        histogram, sums = launch.empty(count, BINS, dtype=torch.int32), launch.empty(count, 2, dtype=torch.int64)
        _apply_rules(launch, histogram, sums)
        _draw(launch, histogram, sums, tokens, logprobs)
        if top_logprobs:
            _top(launch, top_tokens, top_values)
    return Sampled(tokens, launch.statuses, logprobs, top_tokens, top_values)


def _apply_rules(launch: _Launch, histogram: Tensor, sums: Tensor) -> None:
    rows, filler = launch.rows, launch.statuses  # stands for what is not there, and is not read
    count, chunks = launch.grid
    parts, part_tokens = launch.empty(count, chunks, 4, dtype=torch.float32), launch.empty(count, chunks, 2, dtype=torch.int32)
    ban_starts = filler if rows.banned is None else rows.banned.starts
    ban_tokens = filler if rows.banned is None else rows.banned.tokens
    rules_kernel[launch.grid](
        launch.work,
        launch.logits,
        rows.numbers,
        filler if rows.allowed is None else rows.allowed,
        filler if rows.prompt_seen is None else rows.prompt_seen,
        filler if rows.output_counts is None else rows.output_counts,
        filler if rows.bias is None else rows.bias.starts,
        filler if rows.bias is None else rows.bias.tokens,
        launch.bests if rows.bias is None else rows.bias.values,
        ban_starts,
        ban_tokens,
        parts,
        part_tokens,
        launch.vocab,
        triton.cdiv(launch.vocab, 32),
        COPIES=launch.work is not launch.logits,
        HAS_ALLOWED=rows.allowed is not None,
        HAS_PROMPT=rows.prompt_seen is not None,
        HAS_OUTPUT=rows.output_counts is not None,
        HAS_BIAS=rows.bias is not None,
        HAS_BANS=rows.banned is not None,
        CHUNK=launch.tile.n,
        num_warps=launch.tile.warps,
    )
    state_kernel[(count,)](
        launch.statuses,
        launch.bests,
        launch.best_tokens,
        launch.normalizers,
        launch.work,
        ban_starts,
        ban_tokens,
        parts,
        part_tokens,
        histogram,
        sums,
        chunks,
        launch.vocab,
        HAS_ALLOWED=rows.allowed is not None,
        HAS_BANS=rows.banned is not None,
        BINS=BINS,
        CHUNKS=launch.padded_chunks,
        ENTRIES=ENTRIES,
        num_warps=1,
    )


def _draw(launch: _Launch, histogram: Tensor, sums: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
    count, chunks = launch.grid
    state = (launch.work, launch.statuses, launch.bests, launch.rows.numbers, launch.rows.counts)
    numbers, counts, vocab, tile = launch.rows.numbers, launch.rows.counts, launch.vocab, launch.tile
    drawn, drawn_tokens = launch.empty(count, chunks, dtype=torch.float64), launch.empty(count, chunks, dtype=torch.int32)
    candidates, candidate_tokens = launch.empty(count, vocab, dtype=torch.float32), launch.empty(count, vocab, dtype=torch.int32)
    histogram_kernel[launch.grid](histogram, sums, *state, vocab, BINS=BINS, CHUNK=tile.n, num_warps=tile.warps)
    gather_kernel[launch.grid](candidates, candidate_tokens, histogram, sums, *state, vocab, BINS=BINS, CHUNK=tile.n, num_warps=tile.warps)
    choose = CHOOSE_TILES.tile(architecture_of(launch.logits.device), launch.logits.dtype, vocab)
    choose_kernel[(count,)](
        drawn,
        drawn_tokens,
        candidates,
        candidate_tokens,
        sums,
        launch.statuses,
        numbers,
        counts,
        chunks,
        vocab,
        BLOCK=choose.n,
        num_warps=choose.warps,
    )
    draw_kernel[launch.grid](drawn, drawn_tokens, *state, vocab, CHUNK=tile.n, num_warps=tile.warps)
    finish_kernel[(count,)](
        tokens,
        logprobs,
        launch.logits,
        launch.statuses,
        launch.best_tokens,
        launch.normalizers,
        drawn,
        drawn_tokens,
        numbers,
        counts,
        chunks,
        vocab,
        CHUNKS=launch.padded_chunks,
        num_warps=1,
    )


def _top(launch: _Launch, tokens: Tensor, logprobs: Tensor) -> None:
    count, chunks = launch.grid
    n = tokens.shape[1]
    parts, part_tokens = launch.empty(count, chunks * n, dtype=torch.float32), launch.empty(count, chunks * n, dtype=torch.int32)
    top_parts_kernel[launch.grid](parts, part_tokens, launch.logits, launch.vocab, n, CHUNK=launch.tile.n, num_warps=launch.tile.warps)
    padded = triton.next_power_of_2(chunks * n)
    top_join_kernel[(count,)](logprobs, tokens, parts, part_tokens, launch.normalizers, chunks * n, n, PARTS=padded, num_warps=4)
