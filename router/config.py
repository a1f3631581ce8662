"""Configuration of the router. Unknown keys are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from router.policy.policies import PolicyName


class RouterConfig(BaseModel):
    """Front door: admission, queueing, limits. Units are last in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: PolicyName = Field(
        "least_ttft", description="Choice of the replica; all but the first are baselines for comparison."
    )
    queue_time_slo_s: float = Field(10.0, gt=0, description="Arrival until the first step that schedules the request; beyond it, shed.")
    admission_quantile: float = Field(0.98, gt=0, lt=1, description="Quantile of the prediction that must keep the SLO.")
    queue_depth_max: int = Field(1024, ge=1, description="Requests waiting at the router.")
    queue_tokens_max: int = Field(2_000_000, ge=1, description="Prompt tokens waiting at the router.")
    prefix_index_bytes_max: int = Field(64 * 1024 * 1024, ge=1024, description="Memory of the prefix index; oldest entries leave first.")
    stall_min_s: float = Field(2.0, gt=0, description="A replica without progress for max(this, 4 × predicted step) is stalled.")
    moves_max: int = Field(3, ge=0, description="Times a stream may move to another replica.")
    replica_losses_max: int = Field(2, ge=1, description="Replicas that may die under one request before it is given up.")
    drain_timeout_s: float = Field(30.0, gt=0, description="After it, streams of a draining replica move.")
    api_keys: tuple[str, ...] = Field((), description="Accepted bearer tokens; empty: no authentication.")

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        """An empty key would let in whoever sends none, one that no header can carry (a file's last newline) nobody."""
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise ValueError("every key must be printable ASCII without spaces, and not empty")
        return keys
