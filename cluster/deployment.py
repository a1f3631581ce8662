"""Put the application on a running Ray, watch it come up, take it down again."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from cluster import local_ray, placement, stages
from cluster.config import Config
from cluster.cores import usable_cores
from cluster.environment import SPARE_PORT, haproxy_sockets
from cluster.haproxy_state import first_choice_is_up
from cluster.preflight import StartError

USER_FAULTS = ("ModelError", "ValueError", "RankError")  # of a replica that cannot be as configured: the sentence says all
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


def check_placement(config: Config) -> None:
    """Raises StartError where the nodes there are cannot hold the ranks: Ray would wait for others without a word.

    A cluster that is joined may gain nodes meanwhile: there it is a warning. A Ray of our own was told that it has what is asked for:
    more than there is is a warning too.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    contradiction = placement.contradiction(config, sum(node.get("GPU", 0.0) for node in nodes))
    if contradiction:
        raise StartError(contradiction)
    shortage = placement.shortage(config, nodes)
    joined_address = local_ray.joined_address(config)
    if shortage and joined_address is None:
        raise StartError(shortage)
    if joined_address is None and (beyond := placement.overcommitment(config, usable_cores())):
        stages.error(f"warning: {beyond}")
    if shortage:
        stages.error(f"warning: {shortage}; Ray waits until nodes with that room have joined")


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


def wait_ready(config: Config, url: str, *, haproxy: bool) -> None:
    """Until the router says that it would serve a request, and HAProxy, if there is one here, asks a router first. Raises StartError."""
    deadline = time.monotonic() + config.serve.start_timeout_s
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=_HTTP_TIMEOUT_S) as response:
                if response.status == 200:
                    break
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}"
        except OSError as error:
            reason = str(error)
        time.sleep(_POLL_S)
    else:
        raise StartError(f"{url}/ready did not become 200: {reason}", see_logs=True)
    while haproxy and time.monotonic() < deadline:
        if any(first_choice_is_up(path) for path in haproxy_sockets()):
            return
        time.sleep(_POLL_S)
    if haproxy:
        raise StartError("HAProxy did not come to know a router", see_logs=True)


def replica_stats(config: Config) -> dict[str, Any]:
    """What one replica says of itself (they are alike), {} if it does not answer."""
    try:
        return dict(_handle("Replica", config).stats.remote().result(timeout_s=_HTTP_TIMEOUT_S))
    except Exception:  # only for show
        return {}


def take_down(config: Config, interrupted: Callable[[], bool], *, delete: bool) -> bool:
    """Let running requests finish; then delete the application, if its Ray lives on. False if `interrupted` or the time was up before.

    Without `delete` the routers stay and answer 503 until Ray ends; while an application is deleted, Serve says 404.
    """
    drained_by = time.monotonic() + config.router.drain_timeout_s
    drained = _close_routers(config, lambda: interrupted() or time.monotonic() > drained_by)
    if delete:
        _delete(config, interrupted)
    return drained


def _delete(config: Config, interrupted: Callable[[], bool]) -> None:
    """Nothing runs any more; a frozen replica is not waited for longer than the margin."""
    from ray import serve

    from cluster.app import STOP_MARGIN_S, app_name

    serve.delete(app_name(config), _blocking=False)
    gone_by = time.monotonic() + STOP_MARGIN_S
    while app_name(config) in serve.status().applications and not interrupted() and time.monotonic() < gone_by:
        time.sleep(_POLL_S)


def withdraw(config: Config) -> None:
    """Delete an application that did not come up, waiting for nothing."""
    from ray import serve

    from cluster.app import app_name

    with contextlib.suppress(Exception):  # the cluster may be what has failed
        serve.delete(app_name(config), _blocking=False)


def _close_routers(config: Config, hopeless: Callable[[], bool]) -> bool:
    """Tell every router to let nothing new in and wait for the last request. A router that is gone has none."""
    routers = _handle("Router", config)

    def close() -> bool:
        try:
            routers.stats.remote().result(timeout_s=_HTTP_TIMEOUT_S)  # a new handle broadcasts to nobody until it has learnt who is there
            return all(routers.broadcast("drain", config.router.drain_timeout_s).results())
        except Exception:  # the cluster itself is going down, or no router is left: nothing to wait for
            return True

    return finished(close, hopeless)


def finished(work: Callable[[], bool], hopeless: Callable[[], bool]) -> bool:
    """What `work` answers, or False if `hopeless` before that. It waits on a thread and once: asked for its result again and
    again with a short time limit, a busy machine never has it in time."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(work()), name="drain", daemon=True)
    thread.start()
    while thread.is_alive() and not hopeless():
        thread.join(_POLL_S)
    return bool(answers and answers[0])


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
            alerts = "; ".join(line for line in message.splitlines() if line.startswith("[ALERT]"))  # why HAProxy ended
            return StartError(f"{kind}:{said}{'; ' * bool(alerts)}{alerts}", see_logs=True)
    return StartError(next((message for message in messages if message), "the application failed to start"), see_logs=True)


def _looks_like_error(line: str) -> bool:
    head, separator, _ = line.partition(":")
    return bool(separator) and head.replace(".", "").replace("_", "").isalnum() and head.endswith(("Error", "Exception", "Lost"))
