"""How rotary frequencies are changed for contexts longer than trained, read from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from replica.contract.gguf_header import GgufHeader
from replica.contract.model_error import ModelError

Kind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """linear: all ÷ factor. dynamic: the base grows with the context that is served. llama3: by wavelength against the original
    context. yarn: by the number of turns within the original context, and attention is sharpened by `attention_factor`."""

    kind: Kind
    factor: float
    original_context: int  # tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn: turns within the original context beyond which a frequency stays
    beta_slow: float = 1.0  # and below which it is ÷ factor
    attention_factor: float = 1.0  # cosine and sine are multiplied by it
    truncate: bool = True  # yarn: the bounds are rounded to whole dimensions


def scaling_of_json(fields: Mapping[str, Any], context: int, path: Path) -> RopeScaling | None:
    """From `rope_parameters` (newer checkpoints) or `rope_scaling`; `context` is max_position_embeddings.

    Raises ModelError, naming the kind or the key, for what is unknown, incomplete or nonsense.
    """
    rope = _entries(fields, path)
    turned = {**fields, **rope}.get("partial_rotary_factor")
    if turned not in (None, 1):
        raise ModelError(f"{path}: partial_rotary_factor {turned!r} is not supported (only whole heads are turned)")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind not in get_args(Kind):
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported (supported: {', '.join(get_args(Kind))})")
    original = fields.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or context
    try:
        if kind == "yarn":
            return _yarn(rope, int(original), context)
        factor = _positive(rope["factor"])
        if kind != "llama3":
            return RopeScaling(kind, factor, context)
        low, high = _positive(rope["low_freq_factor"]), _positive(rope["high_freq_factor"])
        if not low < high:
            raise ValueError(f"low_freq_factor {low} is not below high_freq_factor {high}")
        return RopeScaling(kind, factor, int(original), low_freq_factor=low, high_freq_factor=high)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: rope scaling {kind!r}: {error!r}") from error


def scaling_of_gguf(header: GgufHeader, stem: str, context: int, path: Path) -> RopeScaling | None:
    """From the metadata `<stem>.rope.scaling.*`. (llama3 comes as a tensor of factors, models.loader.)"""
    prefix = f"{stem}.rope.scaling"
    kind = header.text(f"{prefix}.type", "none")
    if kind == "none":
        return None
    factor = header.number(f"{prefix}.factor") or 1.0
    original = header.integer(f"{prefix}.original_context_length") or context
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    if kind == "yarn":
        fast, slow = header.number(f"{prefix}.yarn_beta_fast") or 32.0, header.number(f"{prefix}.yarn_beta_slow") or 1.0
        sharper = (header.number(f"{prefix}.attn_factor") or 1.0) * _sharpening(factor)
        return RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=sharper)
    raise ModelError(f"{path}: rope scaling {kind!r} is not supported (supported in a GGUF: linear, yarn)")


def _entries(fields: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        entries = fields.get(key)
        if entries is None:
            continue
        if not isinstance(entries, dict) or any(isinstance(value, dict) for value in entries.values()):
            raise ModelError(f"{path}: {key} is not one set of numbers for all layers, which alone is supported")
        if key == "rope_scaling" or "rope_type" in entries or "partial_rotary_factor" in entries:
            return entries
    return {}


def _yarn(rope: Mapping[str, Any], original: int, context: int) -> RopeScaling:
    factor = _positive(rope.get("factor") or context / original)
    attention = rope.get("attention_factor")
    if attention is None:
        scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = (
            _sharpening(factor, float(scale)) / _sharpening(factor, float(scale_all)) if scale and scale_all else _sharpening(factor)
        )
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=_positive(rope.get("beta_fast") or 32.0),
        beta_slow=_positive(rope.get("beta_slow") or 1.0),
        attention_factor=_positive(attention),
        truncate=bool(rope.get("truncate", True)),
    )


def _sharpening(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _positive(value: Any) -> float:
    number = float(value)
    if not (0 < number < math.inf):
        raise ValueError(f"{value!r} is not a positive number")
    return number
