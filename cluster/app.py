"""One Serve application from one configuration: routers before replicas."""

from __future__ import annotations

import re
import secrets
from typing import Any

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster import placement
from cluster.config import Config, parse
from cluster.replica_deployment import Replica
from cluster.router_deployment import Router

SECRET_BYTES = 32
STOP_MARGIN_S = 10.0  # after a drain: links close, buffers empty
HEALTH_CHECK_PERIOD_S = 1.0  # sets how soon a dead replica is replaced
HEALTH_CHECK_TIMEOUT_S = 5.0  # Serve replaces a process after three checks in a row that took longer
MAX_ONGOING_REQUESTS = 100_000  # the router's own admission decides, never Serve's counter
_SECRET_KEY = b"rantang/link-secret"


def build(config: Config) -> Application:
    """Routers (the ingress) with a handle to the replicas. The secret of the link goes to both as an argument."""
    secret = link_secret()
    stop_s = config.router.drain_timeout_s + STOP_MARGIN_S
    serving = config.serve
    gpus = float(ray.cluster_resources().get("GPU", 0.0)) if ray.is_initialized() else 0.0
    reserved, of_rank = placement.bundles(config, gpus), placement.of_rank(config, gpus)
    replica = serve.deployment(
        Replica,
        **({"placement_group_bundles": reserved, "placement_group_strategy": serving.placement_strategy} if reserved else {}),
        name="Replica",
        num_replicas=serving.replicas,
        ray_actor_options={"num_cpus": of_rank.get("CPU", 0.0), "num_gpus": of_rank.get("GPU", 0.0)},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=stop_s,
        graceful_shutdown_wait_loop_s=0.1,
        request_router_config=RequestRouterConfig(request_router_class="cluster.membership:LinkMembership"),
    )
    router = serve.deployment(
        serve.ingress(None)(Router),
        name="Router",
        num_replicas=serving.routers,
        ray_actor_options={"num_cpus": serving.router_cpus},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=stop_s,
        graceful_shutdown_wait_loop_s=0.1,
    )
    application: Application = router.bind(config, secret, replica.bind(config, secret))
    return application


def build_from_args(args: dict[str, Any]) -> Application:
    """For `serveConfigV2`: `args` is the configuration tree. Misspelled keys are refused, which Ray's own schema does not do."""
    return build(parse(args, source="args"))


def app_name(config: Config) -> str:
    """The application's name in Ray, and so in the names of its actors and processes: the model's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", config.model_name).strip("-.") or "model"


def link_secret() -> bytes:
    """The cluster's secret: drawn once and kept by Ray, so that building again changes nothing and restarts nobody."""
    if not ray.is_initialized():
        return secrets.token_bytes(SECRET_BYTES)
    _internal_kv_put(_SECRET_KEY, secrets.token_bytes(SECRET_BYTES), overwrite=False)
    kept = _internal_kv_get(_SECRET_KEY)
    if not isinstance(kept, bytes) or len(kept) != SECRET_BYTES:
        raise RuntimeError("Ray did not keep the secret of the link")
    return kept
