"""The router's HTTP application."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from opentelemetry.trace import Tracer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.api.auth import Authenticator
from router.api.context import Context
from router.api.endpoints import Chat, Completions
from router.api.front import Front, http_error
from router.api.generate import GenerateApp
from router.api.information import DecisionsPage, Health, MetricsPage, Models, Ready, Version
from router.api.intake import Intake
from router.api.metrics import Metrics
from router.api.text_pool import TextPool
from router.api.tokenization import Detokenize, Tokenize
from router.api.tracing import Tracing
from router.config import RouterConfig
from router.policy.classes import Classes
from router.ports import Backend
from router.served_model import ServedModel


class RouterApp(Starlette):
    """Requests for tokens go straight to their endpoint: Starlette's routing and its layers cost as much as a refusal itself."""

    direct: Mapping[str, Front] = MappingProxyType({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and (endpoint := self.direct.get(scope["path"])) is not None:
            await endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def build_app(backend: Backend, model: ServedModel, config: RouterConfig, *, tracer: Tracer | None = None) -> Starlette:
    """The whole front door over `backend`. Needs no lifespan and keeps no task of its own; no CORS headers are ever sent.

    `tracer`: where spans go; the process's OpenTelemetry provider unless given.
    """
    classes = Classes(config.service_classes())
    context = Context(
        backend=backend,
        model=model,
        config=config,
        metrics=Metrics(model.name, backend, classes),
        tracing=Tracing(model.name, tracer),
        pool=TextPool(),
        intake=Intake(),
        classes=classes,
    )
    generate = {endpoint.path: GenerateApp(context, endpoint) for endpoint in (Chat(context), Completions(context))}
    routes = [
        *(Route(path, app, methods=["POST"]) for path, app in generate.items()),
        Route("/v1/models", Models(context), methods=["GET"]),
        Route("/v1/models/{name:path}", Models(context), methods=["GET"]),
        Route("/tokenize", Tokenize(context), methods=["POST"]),
        Route("/detokenize", Detokenize(context), methods=["POST"]),
        Route("/health", Health(context), methods=["GET"]),
        Route("/ready", Ready(context), methods=["GET"]),
        Route("/version", Version(), methods=["GET"]),
        Route("/metrics", MetricsPage(context), methods=["GET"]),
        Route("/debug/decisions", DecisionsPage(context), methods=["GET"]),
    ]
    authenticator = Authenticator(config.api_keys, {name: tenant.api_keys for name, tenant in config.tenants.items()})
    app = RouterApp(
        routes=routes,
        middleware=[Middleware(Front, authenticator=authenticator, refused=context.metrics.invalid)],
        exception_handlers={HTTPException: http_error},
    )
    app.direct = {path: Front(endpoint, authenticator, context.metrics.invalid) for path, endpoint in generate.items()}
    return app
