"""What the policy needs to know of a request."""

from __future__ import annotations

import msgspec


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """One client request, or one stream of it that moves. Its choices are admitted together; most often they share the prompt."""

    prompt_tokens: int  # of the first choice; those already emitted by an earlier attempt included
    block_keys: tuple[bytes, ...]
    max_tokens: int  # still to generate, at most
    choices: int = 1
    prompts: int = 1  # different ones among the choices
    other_tokens: int = 0  # Σ tokens of the different prompts after the first
    total_tokens: int = 0  # Σ prompt tokens over all choices; 0: prompt_tokens × choices
    longest_tokens: int = 0  # of any choice's prompt; 0: prompt_tokens
    request_class: str = "standard"
    tenant: str = ""
    priority: int = 0
    in_order: bool = False  # too long to pass others, however short it is said to be

    @property
    def all_tokens(self) -> int:
        """Of the prompts of all choices."""
        return self.total_tokens or self.choices * self.prompt_tokens
