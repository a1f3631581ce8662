"""What a replica has measured of its steps, kept by Ray for the one that takes its place: that one need not measure while others wait.

Kept by node, engine's configuration, and what computes (the model's files, the kernels, versions): elsewhere, or of another model or
number of threads, steps take another time. The latest counts: what a replica has learned of real requests when it was last asked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from typing import Any

import msgspec
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from cluster.rank_actors import last_line
from replica.config import EngineConfig
from replica.contract.messages import StepTimeCoefficients
from replica.contract.step_time import predict_step_s
from router.policy.report_check import STEP_S_MAX

_PREFIX = "rantang/step-time"
_PACKAGES = ("rantang", "torch", "triton")
VARIABLES = ("RANTANG_KERNELS", "RANTANG_CPU_ISA", "RANTANG_ALL_REDUCE")  # of the environment, that choose what computes


class KnownSteps:
    """Of one replica. A store that does not answer costs a line in `log` and nothing else."""

    def __init__(self, config: EngineConfig, node_id: str, log: Any) -> None:
        """`config` as the engine gets it: with its threads."""
        self._config = config
        self._node_id = node_id
        self._log = log
        self._where: bytes | None = None  # unknown until it is known what computes
        self._last: StepTimeCoefficients | None = None

    def recall(self, computes: tuple[str, ...]) -> StepTimeCoefficients | None:
        """None: nobody has measured here with what `computes`, or what was kept cannot be true."""
        self._where = key(self._config, self._node_id, computes)
        try:
            kept = _internal_kv_get(self._where)
        except Exception as error:  # whatever the store says: then it is measured
            self._log.warning("what steps take here cannot be recalled", reason=last_line(error))
            return None
        self._last = None if kept is None else decode(kept, self._config)
        return self._last

    def keep(self, measured: StepTimeCoefficients) -> None:
        """Unless it is what was kept last, or cannot be true. Nothing where nobody has asked: no step was timed."""
        if self._where is None or measured == self._last or not is_possible(measured, self._config):
            return
        try:
            _internal_kv_put(self._where, msgspec.msgpack.encode(measured), overwrite=True)
        except Exception as error:
            self._log.warning("what steps take here cannot be kept", reason=last_line(error))
            return
        self._last = measured


def key(config: EngineConfig, node_id: str, computes: tuple[str, ...]) -> bytes:
    """`computes`: the model's files and the kernels, in words."""
    environment = [os.environ.get(name, "") for name in VARIABLES]
    said = msgspec.json.encode([config.model_dump_json(), computes, environment, [_version(name) for name in _PACKAGES]])
    return f"{_PREFIX}/{node_id}/{hashlib.sha256(said).hexdigest()}".encode()


def decode(kept: bytes, config: EngineConfig) -> StepTimeCoefficients | None:
    """None for what is no set of coefficients, or none that is possible."""
    try:
        found = msgspec.msgpack.decode(kept, type=StepTimeCoefficients)
    except msgspec.MsgspecError:
        return None
    return found if is_possible(found, config) else None


def is_possible(k: StepTimeCoefficients, config: EngineConfig) -> bool:
    """What a router believes (router.policy.report_check), of a full step too; and not all zero."""
    values = msgspec.structs.astuple(k)
    if not all(0 <= value <= STEP_S_MAX for value in values) or not any(values):  # what is no number is in no range
        return False
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    length = config.max_model_len or tokens
    full_s = predict_step_s(k, prefill_tokens=tokens, decodes=seqs, context_tokens=seqs * length, prefill_context=tokens * length)
    return full_s <= STEP_S_MAX


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
