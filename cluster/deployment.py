"""Put the application on a running Ray, watch it come up, take it down again."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from cluster.config import Config
from cluster.environment import SPARE_PORT
from cluster.preflight import StartError

USER_FAULTS = ("ModelError", "ValueError")  # of a replica that cannot be as configured: the sentence says all
_POLL_S = 0.1
_HTTP_TIMEOUT_S = 5.0


def deploy(config: Config, *, haproxy: bool) -> None:
    """Start Serve if it does not run and deploy; returns at once, `wait_running` watches."""
    from ray import serve
    from ray.serve import RunTarget
    from ray.serve.config import ProxyLocation

    from cluster.app import app_name, build

    logs = {"log_level": "WARNING" if config.serve.log_level != "debug" else "DEBUG", "enable_access_log": False}
    if haproxy:
        http = {"host": config.serve.host, "port": config.serve.port}
    else:
        http = {"host": config.serve.host, "port": int(os.environ[SPARE_PORT])}
    serve.start(http_options=http, proxy_location=ProxyLocation.EveryNode, logging_config=logs)
    target = RunTarget(build(config), name=app_name(config), route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def wait_running(config: Config, on_progress: Callable[[int], None]) -> None:
    """Until every deployment runs. `on_progress` is told how many replicas do. Raises StartError with the cause."""
    from ray import serve

    from cluster.app import app_name

    deadline = time.monotonic() + config.serve.start_timeout_s
    while time.monotonic() < deadline:
        application = serve.status().applications.get(app_name(config))
        if application is not None:
            states = {name: deployment.replica_states for name, deployment in application.deployments.items()}
            on_progress(int(states.get("Replica", {}).get("RUNNING", 0)))
            if application.status == "RUNNING":
                return
            if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise failure([application.message, *(one.message for one in application.deployments.values())])
        time.sleep(_POLL_S)
    raise StartError(f"the replicas were not ready within {config.serve.start_timeout_s:g} s (start_timeout_s)", see_logs=True)


def wait_ready(config: Config, url: str) -> None:
    """Until the router says that it would serve a request. Raises StartError."""
    deadline = time.monotonic() + config.serve.start_timeout_s
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=_HTTP_TIMEOUT_S) as response:
                if response.status == 200:
                    return
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}"
        except OSError as error:
            reason = str(error)
        time.sleep(_POLL_S)
    raise StartError(f"{url}/ready did not become 200: {reason}", see_logs=True)


def replica_stats(config: Config) -> dict[str, Any]:
    """What one replica says of itself (they are alike), {} if it does not answer."""
    try:
        return dict(_handle("Replica", config).stats.remote().result(timeout_s=_HTTP_TIMEOUT_S))
    except Exception:  # only for show
        return {}


def take_down(config: Config, interrupted: Callable[[], bool]) -> bool:
    """Let running requests finish, then delete the application. False if `interrupted` or the time was up before."""
    from ray import serve

    from cluster.app import STOP_MARGIN_S, app_name

    drained_by = time.monotonic() + config.router.drain_timeout_s
    if not _close_routers(config, lambda: interrupted() or time.monotonic() > drained_by):
        return False
    serve.delete(app_name(config), _blocking=False)
    gone_by = time.monotonic() + STOP_MARGIN_S  # nothing runs any more; a frozen replica is not waited for longer
    while app_name(config) in serve.status().applications:
        if interrupted() or time.monotonic() > gone_by:
            return False
        time.sleep(_POLL_S)
    return True


def withdraw(config: Config) -> None:
    """Delete an application that did not come up, waiting for nothing."""
    from ray import serve

    from cluster.app import app_name

    with contextlib.suppress(Exception):  # the cluster may be what has failed
        serve.delete(app_name(config), _blocking=False)


def _close_routers(config: Config, hopeless: Callable[[], bool]) -> bool:
    """Tell every router to let nothing new in and wait for the last request. A router that is gone has none."""
    routers = _handle("Router", config)
    try:
        routers.stats.remote().result(timeout_s=_HTTP_TIMEOUT_S)  # a new handle broadcasts to nobody until it has learnt who is there
    except Exception:
        return True
    answers = routers.broadcast("drain", config.router.drain_timeout_s)
    while not hopeless():
        try:
            answers.results(timeout_s=_POLL_S)
        except TimeoutError:
            continue
        except Exception:  # the cluster itself is going down: nothing left to wait for
            pass
        return True
    return False


def _handle(name: str, config: Config) -> Any:
    """A handle for control calls; it listens on a thread of its own, because this process has no event loop."""
    from ray import serve

    from cluster.app import app_name

    handle = serve.get_deployment_handle(name, app_name(config))
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)
    return handle


def public_url(config: Config) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.serve.host, config.serve.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{config.serve.port}"


def failure(messages: list[str]) -> StartError:
    """What went wrong, from Ray's messages with their tracebacks: the last exception of the last message that has one."""
    for message in reversed(messages):
        errors = [line.strip() for line in message.splitlines() if _looks_like_error(line.strip())]
        if errors:
            kind, _, said = errors[-1].partition(":")
            kind = kind.rsplit(".", 1)[-1]
            if kind in USER_FAULTS:
                return StartError(said.strip())
            return StartError(f"{kind}:{said}", see_logs=True)
    return StartError(next((message for message in messages if message), "the application failed to start"), see_logs=True)


def _looks_like_error(line: str) -> bool:
    head, separator, _ = line.partition(":")
    return bool(separator) and head.replace(".", "").replace("_", "").isalnum() and head.endswith(("Error", "Exception", "Lost"))
