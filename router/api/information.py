"""What the router says of itself: models, health, readiness, version, metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.api.context import Context
from router.api.endpoints import check_model
from router.api.errors import ApiError
from router.api.generate import CALLER_KEY, NOBODY
from router.api.respond import respond, respond_error, respond_json


class Models:
    """/v1/models and /v1/models/{id}."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = Request(scope).path_params.get("name")
        if name is None:
            await respond_json(scope, send, {"object": "list", "data": [self._card()]})
            return
        check_model(name, self._context)
        await respond_json(scope, send, self._card())

    def _card(self) -> dict[str, object]:
        limits = self._context.limits()
        return {
            "id": self._context.model.name,
            "object": "model",
            "created": self._context.model.created_s,
            "owned_by": "rantang",
            "root": self._context.model.name,
            "max_model_len": None if limits is None else limits.max_model_len,
        }


class Health:
    """Live: 200 unless work is pending and nothing has moved for the stall limit."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        live = self._context.backend.status().live
        await respond_json(scope, send, {"status": "live" if live else "stalled"}, 200 if live else 503)


class Ready:
    """200 when a request would be served now."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = self._context.backend.status()
        if status.ready:
            await respond_json(scope, send, {"status": "ready", "replicas": status.replicas})
        else:
            reason = status.reason or "no replica is ready"
            await respond_error(scope, send, ApiError(503, reason, code="not_ready", retry_after_s=1.0))


class Version:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            number = version("rantang")
        except PackageNotFoundError:  # run from a checkout that is not installed
            number = "unknown"
        await respond_json(scope, send, {"version": number})


class MetricsPage:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope, send, 200, self._context.metrics.render(), [(b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())])


class DecisionsPage:
    """The last decisions about the caller's own tenant, with every candidate. Only where the configuration asks for it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._context.config.debug_decisions:
            raise ApiError(404, "there is no such route: debug_decisions is 0")
        tenant = scope.get(CALLER_KEY, NOBODY).tenant  # without keys there is one tenant, and all is its own
        own = [one for one in self._context.backend.account().decisions if one["tenant"] == tenant]
        await respond_json(scope, send, {"object": "list", "data": own})
