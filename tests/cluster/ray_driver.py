"""Run by local_stack.Driver: joins a Ray, then answers JSON commands from stdin on stdout, one a line, until stdin ends."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema

from cluster.app import build, link_secret
from cluster.config import parse


def router_stats(name: str = "smollm2") -> dict[str, Any]:
    return dict(serve.get_deployment_handle("Router", name).stats.remote().result(timeout_s=60))


def application(name: str) -> dict[str, Any]:
    status = serve.status().applications.get(name)
    if status is None:
        return {"status": None, "message": ""}
    return {"status": status.status.value, "message": status.message}


def redeploy(tree: dict[str, Any]) -> None:
    """Deploy the application anew, as the command does, without waiting."""
    target = serve.RunTarget(build(parse(tree)), name="smollm2", route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def deploy_config(tree: dict[str, Any]) -> None:
    """What KubeRay does with serveConfigV2: Serve's own schema, then the controller."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate(tree))


def delete(name: str) -> None:
    serve.delete(name)


def secrets_agree() -> bool:
    return link_secret() == link_secret()


COMMANDS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (router_stats, application, redeploy, deploy_config, delete, secrets_agree)
}


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    ray.init(log_to_driver=False, logging_level="ERROR")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": COMMANDS[request.pop("command")](**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
