"""The one configuration tree: what a file, flags and `serveConfigV2` may say. Unknown keys are refused, with a suggestion.

Sources, later over earlier: the defaults, a YAML file, flags. Every error is one line with the path of the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replica.config import EngineConfig
from router.config import RouterConfig


class ConfigError(Exception):
    """The configuration cannot be used. `lines` holds one line for the user per fault."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


class ServeConfig(BaseModel):
    """How the cluster is laid out and where it listens. Units are last in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address the HTTP API listens on; 0.0.0.0 for every interface.")
    port: int = Field(8000, ge=1, le=65535, description="Port of the HTTP API.")
    replicas: int = Field(2, ge=1, le=1024, description="Copies of the model. Two, so that one may die or be replaced.")
    routers: int = Field(1, ge=1, le=256, description="Router processes; one carries several replicas.")
    replica_cpus: float = Field(
        0.0,
        ge=0,
        description="CPUs Ray reserves per rank, and so its threads; 0 on one machine: cores ÷ replicas threads, none reserved.",
    )
    replica_gpus: float | None = Field(
        None, ge=0, description="GPUs Ray reserves per rank. Unset: 1 on a cluster that has GPUs, unless device is cpu."
    )
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD"] = Field(
        "STRICT_PACK",
        description="Where a replica's ranks go, if they reserve something: one node, few or many. All-reduce is far quicker in a node.",
    )
    router_cpus: float = Field(0.0, ge=0, description="CPUs Ray reserves per router; above 0 keeps it off a head node without CPUs.")
    ray_address: str | None = Field(None, description="Join this Ray cluster instead of starting one, e.g. 'auto' or 'host:6379'.")
    dashboard: bool = Field(False, description="Start Ray's dashboard with a local Ray; it costs about 150 MB.")
    haproxy: bool = Field(True, description="Listen through HAProxy where it can run; otherwise one router's own port serves.")
    start_timeout_s: float = Field(900.0, gt=0, description="Until the first replica must be ready; includes a model's download.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="Least level that is logged.")


class Config(BaseModel):
    """The whole tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engine: EngineConfig = Field(default_factory=lambda: EngineConfig(), description="One replica's engine.")
    router: RouterConfig = Field(default_factory=lambda: RouterConfig(), description="The front door.")
    serve: ServeConfig = Field(default_factory=lambda: ServeConfig(), description="The cluster.")

    @property
    def model_name(self) -> str:
        """The name in the API: `served_model_name`, or the last part of `model` without a weight file's suffix."""
        model = self.engine.model
        if self.engine.served_model_name:
            return self.engine.served_model_name
        path = Path(model).expanduser()
        return (path.resolve().name if path.exists() else model.rstrip("/").rsplit("/", 1)[-1]).removesuffix(".gguf") or model


SECTIONS: dict[str, type[BaseModel]] = {"engine": EngineConfig, "router": RouterConfig, "serve": ServeConfig}


def parse(tree: Mapping[str, Any], source: str = "") -> Config:
    """The checked tree. Raises ConfigError; `source` (a file's name) is put before every line."""
    prefix = f"{source}: " if source else ""
    unknown = _unknown_keys(tree)
    if unknown:
        raise ConfigError([prefix + line for line in unknown])
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([prefix + _sentence(detail["loc"], detail["msg"], detail["input"]) for detail in error.errors()]) from None


def load(file: Path | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Defaults, then the file, then flags given as {section: {field: value}}. Raises ConfigError."""
    tree: dict[str, Any] = {}
    if file is not None:
        tree = _read(file)
        parse(tree, source=str(file))  # so that a fault of the file is named as such
    for section, values in (flags or {}).items():
        if values:
            tree[section] = {**(tree.get(section) or {}), **values}
    return parse(tree)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError([f"cannot read the configuration file {file}: {reason}"]) from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError([f"{file}{where}: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{file}: {' '.join(str(error).split())}"]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{file}: expected a mapping with {', '.join(SECTIONS)}, found {type(tree).__name__}"])
    return {key: {} if value is None and key in SECTIONS else value for key, value in tree.items()}


class _StrictLoader(yaml.SafeLoader):
    """Plain data only, and no key twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _unknown_keys(tree: Mapping[str, Any]) -> list[str]:
    """One line per key that no field has, in the order given."""
    paths = [f"{section}.{field}" for section, model in SECTIONS.items() for field in model.model_fields]
    lines = []
    for key, value in tree.items():
        if key not in SECTIONS:
            lines.append(f"unknown key {key!r}{_suggest(str(key), [*SECTIONS, *paths])}")
        elif isinstance(value, Mapping):
            lines += [
                f"unknown key '{key}.{field}'{_suggest(f'{key}.{field}', paths)}"
                for field in value
                if field not in SECTIONS[key].model_fields
            ]
    return lines


def _suggest(key: str, known: list[str]) -> str:
    """'; did you mean …?' by the whole path, or by the last part alone (a key put into the wrong section)."""
    last = key.rsplit(".", 1)[-1]
    exact = [path for path in known if path.rsplit(".", 1)[-1] == last]
    close = exact or difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not close:
        by_last = {path.rsplit(".", 1)[-1]: path for path in known}
        close = [by_last[name] for name in difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.7)]
    return f"; did you mean '{close[0]}'?" if close else ""


def _sentence(location: tuple[int | str, ...], message: str, value: object) -> str:
    path = ".".join(str(part) for part in location)
    shown = repr(value)
    secret = "api_keys" in path or "tenants" in path or path == "router"
    given = "" if secret or len(shown) > 80 else f" (given: {shown})"
    return f"{path}: {message[:1].lower()}{message[1:]}{given}"
