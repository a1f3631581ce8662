"""How much of a GPU is left for KV pages, once weights are there and the largest step has shown what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from replica.contract.model_error import ModelError

GRAPHS_BYTES_EACH = 8 * 1024 * 1024  # a captured graph's own: its launches and their arguments


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes on one device. `elsewhere`: held by others, or by this process outside torch (CUDA's context, NCCL's buffers)."""

    total: int
    weights: int
    activations: int  # peak of the largest step, weights left out
    elsewhere: int
    graphs: int  # launches of every shape, the outputs they share, and the working memory of the largest


def pool_bytes(profile: Profile, utilization: float) -> int:
    """What the KV pool of this rank may take. Raises ModelError with the sum when that is nothing."""
    allowed = int(profile.total * utilization)
    left = allowed - profile.weights - profile.activations - profile.elsewhere - profile.graphs
    if left <= 0:
        parts = (
            f"weights {profile.weights}, largest step {profile.activations}, graphs {profile.graphs}, held elsewhere {profile.elsewhere}"
        )
        raise ModelError(
            f"gpu_memory_utilization {utilization:g} of {profile.total} bytes leaves no room for KV pages ({parts}); "
            "more ranks, a smaller max_num_batched_tokens or a larger gpu_memory_utilization would"
        )
    return left
