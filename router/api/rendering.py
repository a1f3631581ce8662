"""From an Event to the bytes of its answer."""

from __future__ import annotations

import structlog

from router.api.answer import Renderer
from router.api.errors import ApiError
from router.api.run import Event, Run

_log = structlog.get_logger()


def rendered(run: Run, renderer: Renderer, event: Event) -> bytes:
    """b"": there is nothing to show. Raises ApiError."""
    usage = run.usage
    try:
        opening = renderer.opening(event.delta, usage) if event.first else b""
        return opening + renderer.piece(event.delta.index, event.piece, usage)
    except Exception as error:
        raise not_rendered() from error


def not_rendered() -> ApiError:
    """For a fault of ours, which is logged."""
    _log.exception("an answer could not be rendered")
    return ApiError(500, "the answer could not be rendered", code="internal_error")
