"""From a message to a request of this engine, or to the reason why not."""

from __future__ import annotations

from collections.abc import Callable

from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import Bounce, BounceReason, EngineLimits, GenerateRequest
from replica.request import Request, Terms
from replica.scheduling_policy import SchedulingPolicy
from replica.step import TokenMask
from replica.validation import fault_of

MaskOf = Callable[[GenerateRequest], TokenMask | None]


class Intake:
    """Knows the limits and what this model's blocks are called; holds no request."""

    def __init__(
        self,
        limits: EngineLimits,
        policy: SchedulingPolicy,
        model: str,
        revision: str,
        eos_token_ids: frozenset[int],
        mask_of: MaskOf | None = None,
    ) -> None:
        self._limits = limits
        self._context_tokens = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        self._by_priority = policy.by_priority
        self._model = model
        self._revision = revision
        self._eos_token_ids = eos_token_ids
        self._mask_of = mask_of

    def take(self, owner: int, message: GenerateRequest, *, number: int, waiting: int, now_s: float) -> Request | Bounce:
        """`waiting` requests are queued already. A larger max_tokens is clamped to what fits; a prompt that never fits is not taken."""
        fault = fault_of(message, self._limits)
        if fault:
            return Bounce(message.attempt, BounceReason.BAD_REQUEST, fault)
        limit = self._context_tokens
        needed = len(message.prompt_ids) + 1
        if needed > limit or needed - 1 + len(message.emitted_ids) > limit:
            text = f"prompt + 1 is {needed} tokens, the limit is {limit} (the least of max_model_len and the KV pool)"
            return Bounce(message.attempt, BounceReason.NEVER_FITS, text)
        if waiting >= self._limits.max_waiting:
            return Bounce(
                message.attempt, BounceReason.QUEUE_FULL, f"{waiting} requests are waiting, the limit is {self._limits.max_waiting}"
            )
        try:
            mask = None if self._mask_of is None else self._mask_of(message)
        except Exception as error:  # a rule that cannot be made is this request's fault alone
            return Bounce(message.attempt, BounceReason.BAD_REQUEST, f"its mask cannot be made: {error}")
        root = root_key(model=self._model, revision=self._revision, adapter=message.adapter, cache_salt=message.cache_salt)
        return Request(
            number,
            message,
            self._terms(owner, message, root, now_s),
            keys=self._keys(message, root),
            tokens_max=min(len(message.prompt_ids) + message.sampling.max_tokens, limit),
            priority=message.priority if self._by_priority else 0,
            mask=mask,
        )

    def _terms(self, owner: int, message: GenerateRequest, root: bytes, now_s: float) -> Terms:
        stop_ids = frozenset(message.sampling.stop_token_ids)
        if not message.sampling.ignore_eos:  # nearly everybody shares one set, which is asked for every token
            stop_ids = stop_ids | self._eos_token_ids if stop_ids else self._eos_token_ids
        return Terms(
            owner=owner,
            attempt=message.attempt,
            prompt_length=len(message.prompt_ids),
            arrival_s=now_s,
            deadline_s=None if message.deadline_s is None or message.emitted_ids else now_s + message.deadline_s,
            stop_ids=stop_ids,
            root=root,
        )

    def _keys(self, message: GenerateRequest, root: bytes) -> list[bytes]:
        """Names of the full blocks. The router's are taken if there is one per full block of the prompt, else made here."""
        size = self._limits.block_size
        if len(message.block_keys) == len(message.prompt_ids) // size and not message.emitted_ids:
            return list(message.block_keys)
        return list(block_keys(root, (*message.prompt_ids, *message.emitted_ids), size))
