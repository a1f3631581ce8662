"""What a step costs and what a replica holds: built-in, from a GPU profile in YAML, or from a measured replica's JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from replica.contract.messages import EngineLimits, StepTimeCoefficients

_COEFFICIENTS = ("a", "b", "c", "d", "e")
_SIZES = ("max_num_batched_tokens", "max_num_seqs", "block_size", "cache_blocks", "pool_blocks", "max_model_len")


class ProfileError(ValueError):
    """A profile that cannot be used; says why."""


GPU_8B = StepTimeCoefficients(a=0.008, b=1 / 20_000, c=20e-6, d=0.04e-6)  # the class of model that the tables are about


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of replica. Seconds and tokens. `pool_blocks` bounds running KV where that is modelled; the default never does."""

    step_time: StepTimeCoefficients = GPU_8B
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    block_size: int = 512
    cache_blocks: int = 8000
    pool_blocks: int = 8000
    max_model_len: int = 1_000_000
    step_slo_s: float | None = None

    def limits(self) -> EngineLimits:
        return EngineLimits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.pool_blocks,
            block_size=self.block_size,
            max_waiting=1_000_000,
            vocab_size=50_000,
            step_slo_s=self.step_slo_s,
        )


def scaled(k: StepTimeCoefficients, by: float) -> StepTimeCoefficients:
    return StepTimeCoefficients(k.a * by, k.b * by, k.c * by, k.d * by, k.e * by)


def read_profile(path: Path) -> Profile:
    """YAML: `step_time: {a, b, c, d, e}` in seconds and any size of Profile. JSON: the same under `step_time` wherever it stands
    in a measured replica's report."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        raise ProfileError(f"{path.name}: {error}") from None
    found = _find(content)
    if found is None:
        raise ProfileError(f"{path.name}: no `step_time` with the numbers a, b, c, d")
    times, beside = found
    values = {name: times.get(name, 0.0) for name in _COEFFICIENTS}
    if not all(isinstance(value, int | float) and value >= 0 for value in values.values()) or values["a"] + values["b"] <= 0:
        raise ProfileError(f"{path.name}: coefficients are seconds, none below 0")
    sizes = {name: int(beside[name]) for name in _SIZES if isinstance(beside.get(name), int) and beside[name] > 0}
    slo_s = beside.get("step_slo_s")
    profile = Profile(StepTimeCoefficients(*(float(values[name]) for name in _COEFFICIENTS)), **sizes)
    return replace(profile, step_slo_s=float(slo_s)) if isinstance(slo_s, int | float) and slo_s > 0 else profile


def _find(content: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The first `step_time` mapping, depth first, and the mapping it stands in."""
    if isinstance(content, dict):
        times = content.get("step_time")
        if isinstance(times, dict) and all(name in times for name in ("a", "b", "c", "d")):
            return times, content
        values = list(content.values())
    else:
        values = content if isinstance(content, list) else []
    for value in values:
        found = _find(value)
        if found is not None:
            return found
    return None
