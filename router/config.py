"""Configuration of the router. Unknown keys are refused."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from router.policy.classes import STANDARD, ServiceClass, Slo
from router.policy.policies import PolicyName

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
CLASSES_MAX = 8
TENANTS_MAX = 1024
SLO_S_MAX = 3600.0


def _from_text(value: Any) -> Any:
    """On a command line a table is JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("must be a table; on the command line JSON") from None


def _check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """An empty key would let in whoever sends none, one that no header can carry (a file's last newline) nobody."""
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("every key must be printable ASCII without spaces, and not empty")
    return keys


class ClassConfig(BaseModel):
    """What one class of service promises. Left out, a time to first token or per token is not promised."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    queue_time_slo_s: float = Field(10.0, gt=0, le=SLO_S_MAX, description="Arrival until the first step that schedules the request.")
    ttft_slo_s: float | None = Field(None, gt=0, le=SLO_S_MAX, description="Arrival until the first token, whatever the length.")
    ttft_slo_per_token_s: float = Field(0.0, ge=0, le=1.0, description="Added to it per prompt token that no cache holds.")
    tpot_slo_s: float | None = Field(None, gt=0, le=60.0, description="Between two tokens of a stream.")
    floor: float = Field(0.0, ge=0, le=0.9, description="Part of what is admitted that the class gets while it has work waiting.")

    def service_class(self, name: str) -> ServiceClass:
        return ServiceClass(name, Slo(self.queue_time_slo_s, self.ttft_slo_s, self.ttft_slo_per_token_s, self.tpot_slo_s), self.floor)


class TenantConfig(BaseModel):
    """Who shares the cluster: the owner of some keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    api_keys: Annotated[tuple[str, ...], Field(min_length=1)] = Field(description="Its bearer tokens.")
    weight: float = Field(1.0, ge=0.01, le=1000, description="Its share, against the other tenants' weights.")
    requests_max: int | None = Field(None, ge=1, description="In flight at once, all routers together.")
    tokens_max: int | None = Field(None, ge=1, description="Prompt tokens in flight at once, all routers together.")

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return _check_keys(keys)


class RouterConfig(BaseModel):
    """Front door: admission, queueing, limits. Units are last in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    policy: PolicyName = Field("least_delay", description="Choice of the replica; all but the first are baselines for comparison.")
    queue_time_slo_s: float = Field(10.0, gt=0, description="Arrival until the first step that schedules the request; beyond it, shed.")
    admission_quantile: float = Field(0.98, gt=0, lt=1, description="Quantile of the prediction that must keep the SLO.")
    queue_depth_max: int = Field(1024, ge=1, description="Requests waiting at the router.")
    queue_tokens_max: int = Field(2_000_000, ge=1, description="Prompt tokens waiting at the router.")
    prefix_index_bytes_max: int = Field(64 * 1024 * 1024, ge=1024, description="Memory of the prefix index; oldest entries leave first.")
    drain_timeout_s: float = Field(30.0, gt=0, description="After it, streams of a draining replica move.")
    api_keys: tuple[str, ...] = Field((), description="Accepted bearer tokens; empty: no authentication.")

    tenants: Annotated[dict[str, TenantConfig], BeforeValidator(_from_text)] = Field(
        {}, description="By name: api_keys, weight, requests_max, tokens_max. Keys of api_keys are tenants of weight 1."
    )
    classes: Annotated[dict[str, ClassConfig], BeforeValidator(_from_text)] = Field(
        {},
        description="By name: queue_time_slo_s, ttft_slo_s, ttft_slo_per_token_s, tpot_slo_s, floor. 'standard' is always there.",
    )
    debug_decisions: int = Field(0, ge=0, le=500, description="Decisions kept for /debug/decisions; 0: there is no such page.")

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return _check_keys(keys)

    @field_validator("tenants", "classes")
    @classmethod
    def _named(cls, table: dict[str, Any]) -> dict[str, Any]:
        if not all(_NAME.fullmatch(name) for name in table):
            raise ValueError("names are 1 to 64 of a-z, 0-9, '.', '_' and '-'")
        return table

    @model_validator(mode="after")
    def _consistent(self) -> RouterConfig:
        if len(self.classes) > CLASSES_MAX or len(self.tenants) > TENANTS_MAX:
            raise ValueError(f"at most {CLASSES_MAX} classes and {TENANTS_MAX} tenants")
        if sum(one.floor for one in self.classes.values()) > 0.9:
            raise ValueError("the floors of all classes together must not exceed 0.9")
        keys = [*self.api_keys, *(key for tenant in self.tenants.values() for key in tenant.api_keys)]
        if len(keys) != len(set(keys)):
            raise ValueError("an API key stands twice in api_keys and tenants")
        return self

    def service_classes(self) -> tuple[ServiceClass, ...]:
        """Those of the configuration; 'standard' by queue_time_slo_s unless it is among them."""
        given = tuple(one.service_class(name) for name, one in self.classes.items())
        return given if STANDARD in self.classes else (ServiceClass(STANDARD, Slo(self.queue_time_slo_s)), *given)
