"""What the policy needs to know of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestView:
    """One client request, or one stream of it that moves. All its choices share the prompt and are admitted together."""

    prompt_tokens: int  # those already emitted by an earlier attempt included
    block_keys: tuple[bytes, ...]
    max_tokens: int  # still to generate, at most
    choices: int = 1
    request_class: str = "interactive"
    tenant: str = ""
    priority: int = 0
