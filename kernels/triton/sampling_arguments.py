"""What the fused sampler asks of its arguments, before anything is launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.reference.sampling import Count, Number, SamplingRows, TokenLists
from kernels.triton.arguments import ask

TOP_MOST = 1024  # likeliest tokens of a row: what a chunk and the joining program look through one by one


def check_sampling(logits: Tensor, rows: SamplingRows, top_logprobs: int) -> None:
    """`logits` [R, V] contiguous. Raises ValueError for shapes that do not fit and for too many top_logprobs, TypeError for a dtype.

    What lies in the lists' `starts` is on the device, and not looked at.
    """
    count, vocab = logits.shape
    if not vocab:
        raise ValueError(f"logits: {list(logits.shape)}, wanted at least one token")
    if not 0 <= top_logprobs <= min(vocab, TOP_MOST):
        raise ValueError(f"top_logprobs: {top_logprobs}, wanted 0 to {min(vocab, TOP_MOST)}")
    ask("numbers", rows.numbers, (count, len(Number)), logits, torch.float64)
    ask("counts", rows.counts, (count, len(Count)), logits, torch.int64)
    words = triton.cdiv(vocab, 32)
    tables = (("allowed", rows.allowed, words), ("prompt_seen", rows.prompt_seen, words), ("output_counts", rows.output_counts, vocab))
    for name, table, width in tables:
        if table is not None:
            ask(name, table, (count, width), logits, torch.int32)
    for name, lists in (("bias", rows.bias), ("banned", rows.banned)):
        if lists is not None:
            _check_lists(name, lists, logits)


def _check_lists(name: str, lists: TokenLists, logits: Tensor) -> None:
    ask(f"{name}.starts", lists.starts, (logits.shape[0] + 1,), logits, torch.int32)
    ask(f"{name}.tokens", lists.tokens, (lists.tokens.numel(),), logits, torch.int32)
    ask(f"{name}.values", lists.values, (lists.tokens.numel(),), logits, torch.float32)
