"""What a replica has measured of its steps, kept by Ray for the one that takes its place: that one need not measure while others wait.

Kept by node and engine's configuration: on another machine, or of another model or number of threads, steps take another time.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from replica.config import EngineConfig
from replica.contract.messages import StepTimeCoefficients

_PREFIX = "rantang/step-time"


def key(config: EngineConfig, node_id: str) -> bytes:
    """`config` as the engine gets it: with its threads."""
    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
    return f"{_PREFIX}/{node_id}/{digest}".encode()


def keep(where: bytes, coefficients: StepTimeCoefficients) -> None:
    """The latest counts."""
    _internal_kv_put(where, msgspec.msgpack.encode(coefficients), overwrite=True)


def recall(where: bytes) -> StepTimeCoefficients | None:
    """None: nobody has measured here, or what was kept cannot be true."""
    kept = _internal_kv_get(where)
    return None if kept is None else decode(kept)


def decode(kept: bytes) -> StepTimeCoefficients | None:
    """None for what is no set of coefficients, each finite and not negative and not all zero."""
    try:
        found = msgspec.msgpack.decode(kept, type=StepTimeCoefficients)
    except msgspec.MsgspecError:
        return None
    values = msgspec.structs.astuple(found)
    return found if all(math.isfinite(value) and value >= 0 for value in values) and any(values) else None
