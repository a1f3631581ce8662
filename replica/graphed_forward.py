"""The forward pass on an accelerator: inputs staged in pinned memory, and decode steps replayed from graphs.

A step in which every row has one token and draws is padded to the next batch size of a bucket and to a table of 2^n pages; rows that
pad write into a page that no request has. The batch says that it recurs, so that lists of a plan too come in few lengths. Whatever plan
the operators make of such a batch is a tree of tensors: one with the same shapes as a recorded one is copied into it, and the record is
replayed. Everything else is computed as it comes. All ranks see the same steps, so all record and replay the same, collectives included;
a shape that one of them cannot record none replays.

The narrowest table is recorded at start, wider ones while serving, when they are first met. All records write into one pair of outputs:
a step's results are read before the next one begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from kernels.batch import HOST_ONLY as HOST_ONLY
from kernels.batch import CacheLayout, PagedBatch
from kernels.ops import Operators
from replica.device import Device, Graph
from replica.forward import Computed, last_tokens
from replica.models.llama import Llama
from replica.parallel.group import TensorParallel
from replica.step_inputs import StepInputs

GRAPHS_MAX = 96  # shapes that are tried; beyond it steps of new ones are computed as they come
EAGER_RUNS = 2  # before a capture: kernels are compiled and libraries set up
PAGES_MIN = 64  # narrowest table
Plans = Mapping[int | None, Any]

_log = structlog.get_logger()


def bucket_sizes(rows_max: int) -> tuple[int, ...]:
    """Batch sizes that are recorded: 1, 2, 4, then steps of 8 to 64, of 16 to 256, and `rows_max` itself where it is smaller."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)]
    return tuple(sorted({*(size for size in sizes if size < rows_max), min(rows_max, 256)}))


def shapes_max(rows_max: int, pages_max: int) -> int:
    """How many graphs there may come to be: a batch size by a width of table, and with a wide one by how much of it the rows fill, in steps
    of four times (about: the operators know). `pages_max`: of the longest sequence."""
    doublings = max(0, (pages_max - 1).bit_length() - (PAGES_MIN - 1).bit_length())
    forms = sum(1 + (wider + 1) // 2 for wider in range(doublings + 1))
    return min(GRAPHS_MAX, len(bucket_sizes(rows_max)) * forms)


@dataclass(frozen=True, slots=True)
class _Record:
    graph: Graph
    plans: Plans


class Staging:
    """Host integers on their way to the device: two pinned buffers in turn, each reused when its copy has been read."""

    def __init__(self, device: Device, tokens_max: int) -> None:
        self._device = device
        self._buffers = [device.pinned((2, tokens_max), torch.int64) for _ in range(2)]
        self._done: list[Callable[[], None]] = [lambda: None, lambda: None]
        self._turn = 0
        self.token_ids = torch.zeros(tokens_max, dtype=torch.int64, device=device.torch_device)
        self.positions = torch.zeros(tokens_max, dtype=torch.int64, device=device.torch_device)

    def stage(self, token_ids: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Both [T] on the device, at the same addresses every time."""
        count = token_ids.size
        if count > self.token_ids.numel():
            raise ValueError(f"a step of {count} tokens exceeds the staging of {self.token_ids.numel()}")
        self._turn = 1 - self._turn
        self._done[self._turn]()
        buffer = self._buffers[self._turn]
        buffer[0, :count] = torch.from_numpy(token_ids)
        buffer[1, :count] = torch.from_numpy(positions)
        self.token_ids[:count].copy_(buffer[0, :count], non_blocking=True)
        self.positions[:count].copy_(buffer[1, :count], non_blocking=True)
        self._done[self._turn] = self._device.copied()
        return self.token_ids[:count], self.positions[:count]


class GraphedForward:
    """A Forward (replica.forward). `pool` has one page more than requests may use: the last is for rows that pad."""

    def __init__(
        self,
        model: Llama,
        operators: Operators,
        layout: CacheLayout,
        device: Device,
        pool: Tensor,
        *,
        tp: TensorParallel,
        rows_max: int,
        tokens_max: int,
    ) -> None:
        self.model = model
        self.layout = layout
        self.pool = pool
        self._operators = operators
        self._device = device
        self._tp = tp
        self._scratch_page = pool.shape[1] - 1
        self._buckets = bucket_sizes(rows_max)
        self._staging = Staging(device, max(tokens_max, self._buckets[-1]))
        self._records: dict[Hashable, _Record | None] = {}  # None: could not be recorded, is computed as it comes
        self._outputs: tuple[Tensor, Tensor] | None = None  # hidden states and logits of the largest bucket, for all records
        self.replays = 0

    @property
    def recorded(self) -> int:
        return sum(record is not None for record in self._records.values())

    @torch.inference_mode()
    def warm(self) -> None:
        """Record every bucket at the narrowest table, before the first request; wider ones when they are first met."""
        for size in reversed(self._buckets):  # the largest first: the others fit into its memory
            rows = np.zeros(size, np.int32)
            batch = PagedBatch(rows, rows + 1, np.full((size, PAGES_MIN), self._scratch_page, np.int32), recurring=True)
            self._decode(np.zeros(size, np.int64), np.zeros(size, np.int64), batch)
        self._device.synchronize()

    def compute(self, inputs: StepInputs) -> Computed:
        rows = len(inputs.drawing)
        if inputs.quiet or rows != inputs.token_ids.size or rows > self._buckets[-1]:
            return self._eager(inputs)
        size = next(bucket for bucket in self._buckets if bucket >= rows)
        batch = self._padded(inputs.batch, size)
        token_ids = np.zeros(size, np.int64)
        token_ids[:rows] = inputs.token_ids
        hidden, logits = self._decode(token_ids, batch.positions.astype(np.int64), batch)
        return Computed(hidden[:rows], logits[:rows])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def close(self) -> None:
        self._records.clear()

    def _eager(self, inputs: StepInputs) -> Computed:
        token_ids, positions = self._staging.stage(inputs.token_ids, inputs.positions)
        hidden = self.model.forward(token_ids, positions, self.pool, self._plan(inputs.batch))
        if not inputs.drawing:
            return Computed(hidden, hidden.new_empty((0, self.model.config.vocab_size)))
        return Computed(hidden, self.model.logits(hidden[last_tokens(inputs, inputs.drawing)]))

    def _padded(self, batch: PagedBatch, size: int) -> PagedBatch:
        """`size` rows over a table of 2^n pages; behind a row's own pages its first is repeated, as everywhere."""
        rows, pages = batch.tables.shape
        width = max(PAGES_MIN, 1 << (pages - 1).bit_length())
        tables = np.full((size, width), self._scratch_page, np.int32)
        tables[:rows] = batch.tables[:, :1]
        tables[:rows, :pages] = batch.tables
        starts, counts = np.zeros(size, np.int32), np.ones(size, np.int32)
        starts[:rows] = batch.starts
        return PagedBatch(starts, counts, tables, recurring=True)

    def _decode(self, token_ids: np.ndarray, positions: np.ndarray, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        ids, places = self._staging.stage(token_ids, positions)
        plans = self._plan(batch)
        key = (token_ids.size, _shape(dict(plans)))
        record = self._records.get(key)
        if record is not None:
            for window, plan in plans.items():
                _overwrite(record.plans[window], plan)
            record.graph.replay()
            self.replays += 1
            assert self._outputs is not None
            return self._outputs[0][: token_ids.size], self._outputs[1][: token_ids.size]
        hidden, logits = self._run(ids, places, plans)
        if key not in self._records and len(self._records) < GRAPHS_MAX:
            self._records[key] = self._record(ids, places, plans)
        return hidden, logits

    def _record(self, ids: Tensor, places: Tensor, plans: Plans) -> _Record | None:
        """The step that was just computed is computed again: it writes the same keys and values to the same places. None: a rank cannot."""
        for _ in range(EAGER_RUNS):
            hidden, logits = self._run(ids, places, plans)
        if self._outputs is None:
            largest = self._buckets[-1]
            self._outputs = hidden.new_empty((largest, hidden.shape[1])), logits.new_empty((largest, logits.shape[1]))
        kept_hidden, kept_logits = (output[: ids.numel()] for output in self._outputs)

        def work() -> None:
            new_hidden, new_logits = self._run(ids, places, plans)
            kept_hidden.copy_(new_hidden)
            kept_logits.copy_(new_logits)

        graph: Graph | None = None
        try:
            graph = self._device.capture(work)
        except RuntimeError as error:  # no memory is left for it, or a kernel asks the host for something
            _log.warning("a step of this shape is not recorded", rows=ids.numel(), reason=str(error).splitlines()[0] if str(error) else "")
        own = torch.tensor([graph is not None], dtype=torch.int64, device=ids.device)
        everywhere = bool(self._tp.all_gather_last_dim(own).all())
        return _Record(graph, plans) if graph is not None and everywhere else None

    def _run(self, ids: Tensor, places: Tensor, plans: Plans) -> tuple[Tensor, Tensor]:
        hidden = self.model.forward(ids, places, self.pool, plans)
        return hidden, self.model.logits(hidden)

    def _plan(self, batch: PagedBatch) -> Plans:
        device = self._device.torch_device
        return {
            window: self._operators.plan_attention(batch, self.layout, self.pool.dtype, device, window)
            for window in dict.fromkeys(self.model.config.layer_windows)
        }


def _shape(value: Any) -> Hashable:
    """Of a tree of tensors: the shapes and dtypes of the tensors, everything else as it is. Equal ones may stand for each other.

    A field with the metadata HOST_ONLY is looked at before a launch and never in one: it may differ.
    """
    if isinstance(value, Tensor):
        return (tuple(value.shape), str(value.dtype))
    if dataclasses.is_dataclass(value):
        kept = (field.name for field in dataclasses.fields(value) if not field.metadata.get(HOST_ONLY))
        return (type(value).__name__, *(_shape(getattr(value, name)) for name in kept))
    if isinstance(value, list | tuple):
        return tuple(_shape(each) for each in value)
    if isinstance(value, dict):
        return tuple((key, _shape(each)) for key, each in value.items())
    if isinstance(value, np.ndarray):
        raise TypeError("a plan holds a host array: what a kernel reads of it could not be replayed")
    assert isinstance(value, Hashable)
    return value


def _overwrite(target: Any, source: Any) -> None:
    """Copy every tensor of `source` into its place in `target`; both have one _shape."""
    if isinstance(target, Tensor):
        target.copy_(source, non_blocking=True)
    elif dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            _overwrite(getattr(target, field.name), getattr(source, field.name))
    elif isinstance(target, list | tuple):
        for one, other in zip(target, source, strict=True):
            _overwrite(one, other)
