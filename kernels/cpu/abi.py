"""The C interface of step.cpp: the same structures, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

from kernels.cpu.build import cpu_flags, granted

FAULTS = {
    1: "shapes that do not agree",
    2: "a token id outside the vocabulary",
    3: "a position beyond the context or the row's table of pages",
    4: "a page outside the pool",
    5: "a place outside the batch",
    6: "no memory",
    7: "a draw from a row that is not there or not finite",
}


class MatrixC(Structure):
    _fields_ = (
        ("kind", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("unused", c_int32),
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class LayerC(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("qkv", MatrixC),
        ("out", MatrixC),
        ("gate_up", MatrixC),
        ("down", MatrixC),
        ("window", c_int64),
    )


class ModelC(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "width", "vocabulary", "block")),
        ("positions", c_int32),
        ("threads", c_int32),
        ("epsilon", c_float),
        ("attention_scale", c_float),
        ("pages", c_int64),
        ("int8_cache", c_int64),
        ("pool", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("layer", POINTER(LayerC)),
        ("embedding", MatrixC),
        ("head", MatrixC),
        ("norm", c_void_p),
    )


class StepC(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("tokens", "rows", "table_width", "wanted_count")),
        *((name, c_void_p) for name in ("ids", "starts", "counts", "tables", "wanted", "hidden", "logits", "best", "best_logits")),
    )


# Draws, an array of them.
DRAW = np.dtype(
    [
        *((name, np.int64) for name in ("row", "best_token")),
        *((name, np.uint64) for name in ("seed", "choice", "position")),
        ("top_k", np.int64),
        *((name, np.float64) for name in ("temperature", "top_p", "min_p", "best")),
    ]
)


def load_library(path: Path) -> ctypes.CDLL:
    """Its functions release Python's lock while they run. Raises OSError."""
    granted(cpu_flags())  # Linux wants to be asked for AMX by the process that uses it
    library = ctypes.CDLL(str(path))
    library.rantang_open.argtypes, library.rantang_open.restype = (POINTER(ModelC),), c_void_p
    library.rantang_step.argtypes, library.rantang_step.restype = (c_void_p, POINTER(StepC)), c_int
    library.rantang_logits.argtypes, library.rantang_logits.restype = (c_void_p, c_void_p, c_int, c_void_p), c_int
    library.rantang_draw.argtypes, library.rantang_draw.restype = (c_void_p, c_void_p, c_int, c_void_p, c_int, c_void_p), c_int
    library.rantang_close.argtypes, library.rantang_close.restype = (c_void_p,), None
    return library
