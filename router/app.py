"""The router's HTTP application."""

from __future__ import annotations

from opentelemetry.trace import Tracer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from router.api.auth import Authenticator
from router.api.context import Context
from router.api.endpoints import Chat, Completions
from router.api.front import Front, http_error
from router.api.generate import GenerateApp
from router.api.information import Health, MetricsPage, Models, Ready, Version
from router.api.intake import Intake
from router.api.metrics import Metrics
from router.api.text_pool import TextPool
from router.api.tokenization import Detokenize, Tokenize
from router.api.tracing import Tracing
from router.config import RouterConfig
from router.ports import Backend
from router.served_model import ServedModel


def build_app(backend: Backend, model: ServedModel, config: RouterConfig, *, tracer: Tracer | None = None) -> Starlette:
    """The whole front door over `backend`. Needs no lifespan and keeps no task of its own; no CORS headers are ever sent.

    `tracer`: where spans go; the process's OpenTelemetry provider unless given.
    """
    context = Context(
        backend=backend,
        model=model,
        config=config,
        metrics=Metrics(model.name, backend.status),
        tracing=Tracing(model.name, tracer),
        pool=TextPool(),
        intake=Intake(),
    )
    routes = [
        Route("/v1/chat/completions", GenerateApp(context, Chat(context)), methods=["POST"]),
        Route("/v1/completions", GenerateApp(context, Completions(context)), methods=["POST"]),
        Route("/v1/models", Models(context), methods=["GET"]),
        Route("/v1/models/{name:path}", Models(context), methods=["GET"]),
        Route("/tokenize", Tokenize(context), methods=["POST"]),
        Route("/detokenize", Detokenize(context), methods=["POST"]),
        Route("/health", Health(context), methods=["GET"]),
        Route("/ready", Ready(context), methods=["GET"]),
        Route("/version", Version(), methods=["GET"]),
        Route("/metrics", MetricsPage(context), methods=["GET"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Front, authenticator=Authenticator(config.api_keys))],
        exception_handlers={HTTPException: http_error},
    )
