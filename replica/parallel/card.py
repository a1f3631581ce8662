"""What every rank of a replica must have in common, told before anything large is read."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import msgspec
import torch

from replica.parallel import step_codec


class RankCard(msgspec.Struct, frozen=True):
    """One rank's. Equal on all ranks, or the group does not start."""

    rantang: str  # version of the program
    steps: int  # of the Steps' format
    torch: str
    weights: str  # replica.contract.fingerprint, of this rank's own files
    dtype: str
    kernels: str
    num_blocks: int
    block_size: int
    max_model_len: int


def card(*, weights: str, dtype: torch.dtype, kernels: str, num_blocks: int, block_size: int, max_model_len: int) -> RankCard:
    """This process's."""
    try:
        version = importlib.metadata.version("rantang")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    name = str(dtype).removeprefix("torch.")
    return RankCard(version, step_codec.VERSION, str(torch.__version__), weights, name, kernels, num_blocks, block_size, max_model_len)


def difference(cards: Sequence[RankCard]) -> str:
    """The first rank that differs from rank 0 and in what, in one line; '' when all agree."""
    first = msgspec.structs.asdict(cards[0])
    for rank, other in enumerate(cards):
        differing = [
            f"{name} {value!r} (rank 0: {first[name]!r})" for name, value in msgspec.structs.asdict(other).items() if value != first[name]
        ]
        if differing:
            return f"rank {rank} differs from rank 0: {', '.join(differing)}"
    return ""


def encode(one: RankCard) -> bytes:
    return msgspec.msgpack.encode(one)


def decode(data: bytes) -> RankCard:
    """Raises msgspec.MsgspecError for what no version of ours would send; an unknown field of a newer one is passed over."""
    return msgspec.msgpack.decode(data, type=RankCard)
