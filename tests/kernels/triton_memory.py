"""What interpreted kernels do to memory: every address is checked, and counted where somebody asks.

An interpreted kernel loads through real pointers. So a load outside the tensors of its launch would read whatever lies there, and
mostly nobody would notice. Here it raises, before it is carried out; `fenced` tensors stand against a page that cannot be touched,
so that even a process without this check would die of it, and so that no other tensor begins where one ends.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE


class OutOfBounds(Exception):
    """A kernel was about to touch memory that is not of its arguments."""


@dataclass
class Traffic:
    """Of the launches inside `counted`. Bytes that were touched count once a launch, however many programs touch them."""

    read: int = 0  # bytes
    written: int = 0  # bytes
    loaded: int = 0  # bytes of all lanes of all loads: what a machine without caches would fetch
    operations: int = 0  # of tl.dot: 2 · M · N · K
    launches: list[str] = field(default_factory=list)

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass
class _Launch:
    kernel: str
    names: list[str]
    starts: np.ndarray  # [n] sorted, of what may be touched
    ends: np.ndarray  # [n]
    loads: list[tuple[np.ndarray, int]] = field(default_factory=list)  # (addresses, bytes each)
    stores: list[tuple[np.ndarray, int]] = field(default_factory=list)


_launches: list[_Launch] = []  # the innermost last
_counting: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Counts what the kernels launched inside do."""
    _counting.append(traffic := Traffic())
    try:
        yield traffic
    finally:
        _counting.pop()


def count_operations(number: int) -> None:
    for traffic in _counting:
        traffic.operations += number


def fenced(tensor: Tensor, *, front: bool = False) -> Tensor:
    """A copy that ends where a page without access begins; with `front` it begins where one ends. Strides become contiguous."""
    size = max(1, tensor.numel() * tensor.element_size())
    pages = -(-size // _PAGE)
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (begin, begin + (pages + 1) * _PAGE):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(_PAGE), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = _PAGE if front else (pages + 1) * _PAGE - size
    if not tensor.numel():
        return torch.empty_like(tensor)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).view(tensor.dtype)
    return flat.view(tensor.shape).copy_(tensor)


def install(interpreter: Any) -> None:
    """Into Triton's interpreter module, once."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas, launch = builder.create_atomic_rmw, builder.create_atomic_cas, executor.__call__

    def size_of(pointers: Any) -> int:
        return int(interpreter._get_np_dtype(pointers.get_element_ty()).itemsize)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _touch("loads", _chosen(pointers.data, mask.data), size_of(pointers))
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _touch("stores", _chosen(pointers.data, mask.data), size_of(pointers))
        return store(self, pointers, value, mask, *rest)

    def checked_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        for kind in ("loads", "stores"):
            _touch(kind, _chosen(pointers.data, mask.data), size_of(pointers))
        return rmw(self, operation, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        for kind in ("loads", "stores"):
            _touch(kind, pointers.data.reshape(-1), size_of(pointers))
        return cas(self, pointers, *rest)

    def watched_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        _launches.append(current := _begin(self, args, kwargs))
        try:
            launch(self, *args, **kwargs)
        finally:
            _launches.pop()
        for traffic in _counting:
            traffic.launches.append(current.kernel)
            traffic.read += _distinct(current.loads)
            traffic.written += _distinct(current.stores)
            traffic.loaded += sum(addresses.size * size for addresses, size in current.loads)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_rmw, checked_cas
    executor.__call__ = watched_launch


def _begin(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Launch:
    named = [*zip(executor.arg_names, args, strict=False), *kwargs.items()]
    places = [(name, *_extent(value)) for name, given in named for value in _tensors(given)]
    places.sort(key=lambda place: place[1])
    starts = np.array([start for _, start, _ in places], np.uint64)
    ends = np.maximum.accumulate(np.array([end for _, _, end in places], np.uint64)) if places else np.zeros(0, np.uint64)
    return _Launch(executor.fn.__name__, [name for name, _, _ in places], starts, ends)


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, tuple):
        return [tensor for each in given for tensor in _tensors(each)]
    given = getattr(given, "base", given) if not isinstance(given, Tensor) else given  # a descriptor's, a wrapper's
    return [given] if isinstance(given, Tensor) and given.numel() else []


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the first behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _chosen(addresses: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Those that the mask lets through, flat."""
    return addresses.reshape(-1) if mask.all() else addresses[np.broadcast_to(mask, addresses.shape)]


def _touch(kind: str, addresses: np.ndarray, size: int) -> None:
    """`addresses` [n], flat, of `size` bytes each."""
    launch = _launches[-1]
    if addresses.size and not _of_one_tensor(launch, addresses, size):
        place = np.searchsorted(launch.starts, addresses, side="right") - 1
        inside = place >= 0
        if inside.any():
            inside &= addresses + np.uint64(size) <= launch.ends[np.maximum(place, 0)]
        if not inside.all():
            raise OutOfBounds(_complaint(launch, kind, addresses, place, inside))
    if _counting:
        (launch.loads if kind == "loads" else launch.stores).append((addresses, size))


def _of_one_tensor(launch: _Launch, addresses: np.ndarray, size: int) -> bool:
    """Whether the least and the largest lie in one, and so does all between them: nearly always, and told without a look at the others."""
    least = addresses.min()
    place = int(np.searchsorted(launch.starts, least, side="right")) - 1
    return place >= 0 and bool(addresses.max() + np.uint64(size) <= launch.ends[place])


def _complaint(launch: _Launch, kind: str, addresses: np.ndarray, place: np.ndarray, inside: np.ndarray) -> str:
    bad = int(np.flatnonzero(~inside)[0])
    before = int(place[bad])
    where = "before every argument"
    if before >= 0:
        where = f"{int(addresses[bad]) - int(launch.ends[before])} bytes past the end of {launch.names[before]}"
    return f"{launch.kernel} {kind} {int((~inside).sum())} elements outside its arguments, the first {where}"


def _distinct(touched: list[tuple[np.ndarray, int]]) -> int:
    """Bytes, each counted once. An element is touched with one size throughout a launch."""
    sizes = {size for _, size in touched}
    return sum(size * np.unique(np.concatenate([a for a, s in touched if s == size])).size for size in sizes)
