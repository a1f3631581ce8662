"""Triton's interpreter as the tests use it: a module that imports this is skipped where kernels are compiled instead
(TRITON_INTERPRET=0, as `make gpu` sets it; tests/conftest.py sets 1 before anything imports triton, and skips test_triton_* where
there is none).

The interpreter computes with numpy, which knows no bfloat16 and no float8: what it would get wrong silently is put right here
(casts, dots) or refused (arithmetic on bfloat16 that was not cast up). Every address that a kernel loads or stores is checked
against the tensors of its launch (triton_memory).

And what it does in vain is left out, which is most of its time: checks of integer overflow whose outcome nobody looks at, the
language replaced anew at every launch, tables of types written anew at every load, shapes spelled anew for every value.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1: kernels are compiled in this process, not interpreted", allow_module_level=True)

import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterError as InterpreterError

from tests.kernels import triton_memory

_TORCH = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}  # by Triton's names
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}  # a GPU's conversion saturates
_FLOAT_ARITHMETIC = (
    "fadd",
    "fmul",
    "fdiv",
    "frem",
    "fsub",
    "fneg",
    "fma",
    "maximumf",
    "minimumf",
    "maxnumf",
    "minnumf",
    "exp",
    "exp2",
    "log",
)
_COMPARISONS = ("OLT", "OGT", "OLE", "OGE", "OEQ", "ONE", "ULT", "UGT", "ULE", "UGE", "UEQ", "UNE")
_Builder: Any = interpreter.InterpreterBuilder
_PLAIN = frozenset({int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type})  # hold no constants to unwrap


def _widened(handle: Any) -> Any:
    """Of a type that numpy lacks → float32."""
    kind = _TORCH.get(handle.dtype.scalar.name)
    if kind is None:
        return handle
    bits = torch.from_numpy(np.array(handle.data, order="C"))  # a copy: what was broadcast is read-only
    return interpreter.TensorHandle(bits.view(kind).float().numpy(), tl.float32)


def _narrowed(handle: Any, kind: Any) -> Any:
    """float32 → a type that numpy lacks, rounded to nearest even as a GPU rounds."""
    exact = torch.from_numpy(np.array(handle.data, dtype=np.float32, order="C"))
    if kind.name in _LARGEST:
        exact = exact.clamp(-_LARGEST[kind.name], _LARGEST[kind.name])
    bits = exact.to(_TORCH[kind.name]).view(torch.uint16 if kind is tl.bfloat16 else torch.uint8)
    return interpreter.TensorHandle(bits.numpy(), kind)


def _with_casts(original: Any) -> Any:
    def cast(self: Any, handle: Any, target: Any, *how: Any) -> Any:
        source, wanted = handle.dtype.scalar, target.scalar
        if source == wanted or not (source.name in _TORCH or wanted.name in _TORCH):
            return original(self, handle, target, *how)
        exact = _widened(handle)
        if wanted.name in _TORCH:
            return _narrowed(exact, wanted)
        return exact if wanted == tl.float32 else self.cast_impl(exact, target)

    return cast


def _dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """Each row by itself: in a product of matrices a BLAS for AVX2 adds up the last rows of a tile in another order than the first."""
    triton_memory.count_operations(2 * a.data.size * b.data.shape[-1])
    rows, columns = _widened(a).data[..., :, None, :], _widened(b).data[..., None, :, :]
    product = np.matmul(rows, columns, dtype=d.data.dtype)[..., 0, :]
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _refusing(name: str, original: Any) -> Any:
    def operation(self: Any, *handles: Any) -> Any:
        if any(getattr(handle, "dtype", None) is not None and handle.dtype.scalar.name in _TORCH for handle in handles):
            raise TypeError(f"{name} on {handles[0].dtype}: the interpreter would compute on its bits; cast to float32 first")
        return original(self, *handles)

    return operation


def _quiet(original: Any) -> Any:
    """exp(-inf - -inf) and the like raise nothing on a GPU."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            original(self, *args, **kwargs)

    return launch


def _patched_once(original: Any) -> Any:
    """Triton replaces its language for every launch and every call of a device function, and puts it back.

    Here nothing is compiled, so that it can stay replaced.
    """
    patched: set[frozenset[int]] = set()
    known: set[Any] = set()

    def patch(function: Any) -> Any:
        if function not in known:
            part = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
            if part not in patched:
                original(function)  # nobody restores it
                patched.add(part)
            known.add(function)
        return interpreter._LangPatchScope()

    return patch


def _remembered(original: Any) -> Any:
    """numpy's type of each of Triton's, which its name determines."""
    known: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = original(kind)
        return found

    return numpy_type


def _shaped_once(original: Any) -> Any:
    """Triton's type of blocks of one element and shape has one name, one number of elements."""
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def construct(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    return construct


def _measured_once(original: Any) -> Any:
    """Values of one shape share the constants that tell it."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def construct(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in known:
            original(self, handle, type)
            known[key] = dict(vars(self))
        vars(self).update(known[key], handle=handle, type=type, dtype=type.scalar)

    return construct


def _broadcast_where_shapes_differ(original: Any) -> Any:
    """Triton compares a tuple with a list, and so broadcasts also what has one shape."""

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        shapes = [value.type.shape if value.type.is_block() else () for value in (left, right)]
        return (left, right) if shapes[0] == shapes[1] else original(self, left, right)

    return broadcast


def _promoted_once(original: Any) -> Any:
    """The type in which two are computed together, which their names determine."""
    known: dict[tuple[Any, ...], Any] = {}

    def promote(self: Any, left: Any, left_is_scalar: bool, right: Any, right_is_scalar: bool, divides: bool) -> Any:
        key = left.name, left_is_scalar, right.name, right_is_scalar, divides
        found = known.get(key)
        if found is None:
            found = known[key] = original(self, left, left_is_scalar, right, right_is_scalar, divides)
        return found

    return promote


def _place_of(plain: Any, among_nans: Any) -> Any:
    """numpy's search for the place of an extreme copies everything to look past NaNs: only where there are any."""

    def place(data: Any, axis: Any, keepdims: bool) -> Any:
        among = data.dtype.kind == "f" and np.isnan(data).any()
        return (among_nans if among else plain)(data, axis=axis, keepdims=keepdims)

    return place


def _with_swift_extremes(original: Any) -> Any:
    swift = {
        np.nanmax: np.fmax.reduce,
        np.nanmin: np.fmin.reduce,
        np.nanargmax: _place_of(np.argmax, np.nanargmax),
        np.nanargmin: _place_of(np.argmin, np.nanargmin),
    }

    def extremes(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return original(self, input, swift.get(val_reduce_op, val_reduce_op), swift.get(idx_reduce_op, idx_reduce_op))

    return extremes


def _histogram(self: Any, data: Any, bins: int, mask: Any) -> Any:
    """Integers counted as integers: numpy's histogram is for edges of any kind."""
    counted = (data.data >= 0) & (data.data < bins) & (True if mask is None else mask.data)
    found = np.bincount(data.data[counted].astype(np.int64), minlength=bins)
    return interpreter.TensorHandle(found.astype(np.int32), tl.int32)


def _plain_first(original: Any) -> Any:
    """What is no constant, and no collection of them, is what it is."""
    return lambda value: value if type(value) in _PLAIN else original(value)


def _install() -> None:
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(_Builder, name, _with_casts(getattr(_Builder, name)))
    _Builder.create_dot = _dot
    _Builder.create_histogram = _histogram
    for name in (*(f"create_{each}" for each in _FLOAT_ARITHMETIC), *(f"create_fcmp{each}" for each in _COMPARISONS)):
        if name == "create_fneg" and not hasattr(_Builder, name):  # triton 3.6 subtracts from 0
            continue
        setattr(_Builder, name, _refusing(name.removeprefix("create_"), getattr(_Builder, name)))
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    tl.core._unwrap_if_constexpr = _plain_first(tl.core._unwrap_if_constexpr)
    tl.block_type.__init__ = _shaped_once(tl.block_type.__init__)
    tl.tensor.__init__ = _measured_once(tl.tensor.__init__)
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _broadcast_where_shapes_differ(semantic.broadcast_impl_value)
    semantic.computation_type_impl = _promoted_once(semantic.computation_type_impl)
    interpreter.ReduceOps.min_max = _with_swift_extremes(interpreter.ReduceOps.min_max)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # it would be asserted, and without `debug` no assertion is
    interpreter.GridExecutor.__call__ = _quiet(interpreter.GridExecutor.__call__)
    triton_memory.install(interpreter)


_install()
