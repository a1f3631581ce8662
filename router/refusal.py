"""What is said to those who are not served, in the words of the API."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.policy.admission import Kind, Shed
from router.policy.classes import Classes
from router.policy.forecast import fits
from router.policy.known import Known
from router.policy.request_view import RequestView

_NAMES = {Kind.QUEUE_TIME: "queue time", Kind.TTFT: "time to first token", Kind.TPOT: "time per token on an idle replica"}


class Refusal(msgspec.Struct, frozen=True, gc=False):
    status: int
    reason: str
    message: str
    retry_after_s: float | None = None


def too_late(shed: Shed, suffix: str = "") -> Refusal:
    expected = f"{shed.expected_s:.3g}" if shed.kind is Kind.TPOT else f"{shed.expected_s:.1f}"
    message = f"the predicted {_NAMES[shed.kind]} of {expected} s exceeds {shed.limit_s:g} s"
    return Refusal(429, shed.kind + suffix, message, shed.retry_after_s)


def unknown_class(classes: Classes) -> Refusal:
    return Refusal(400, "unknown_class", f"there is no such class of service; there are {', '.join(classes.names)}")


def never_fits(known: Sequence[Known], view: RequestView) -> Refusal | None:
    """Replicas are there, and none of them could ever hold it."""
    if not known or any(fits(one.view, view) for one in known):
        return None
    most = max(min(one.view.limits.max_model_len, one.view.limits.num_blocks * one.view.limits.block_size) for one in known)
    return Refusal(400, "never_fits", f"the prompt has {view.prompt_tokens} tokens, and with one to generate at most {most} fit")
