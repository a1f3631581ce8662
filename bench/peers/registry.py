"""The peers by the name they are chosen with."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.home import Home
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.peer import Peer
from bench.peers.routers import sglang_router, vllm_router
from bench.peers.transformers_serve import TransformersServe
from bench.peers.vllm import Vllm


def peers(home: Home, workers: Sequence[str] = ()) -> dict[str, Peer]:
    """All there are. `workers`: what the routers stand in front of."""
    known: tuple[Peer, ...] = (
        Vllm(),
        Vllm(tuned=False),
        Vllm(amx=False),
        LlamaCpp(),
        LlamaCpp(quantised=True),
        TransformersServe(str(home.checkpoint)),
        sglang_router(tuple(workers)),
        vllm_router(tuple(workers)),
    )
    return {peer.name: peer for peer in known}


def peer(name: str, home: Home, workers: Sequence[str] = ()) -> Peer:
    """Raises ValueError with the list for an unknown name."""
    known = peers(home, workers)
    if name not in known:
        raise ValueError(f"unknown peer {name!r}; there are {', '.join(known)}, or any URL")
    return known[name]
