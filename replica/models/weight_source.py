"""Where a model's weights come from: named tensors, of which only the part a rank needs is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.cpu.packed import Groups


@dataclass(frozen=True, slots=True)
class Part:
    """Rank `index` of `count` equal parts."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """This part of 0 … size - 1. `count` divides `size` (models.model_config.shard_problem)."""
        assert size % self.count == 0, (size, self.count)
        width = size // self.count
        return slice(self.index * width, (self.index + 1) * width)


WHOLE = Part()


class WeightSource(Protocol):
    """Tensors under the names of a Hugging Face checkpoint, [out, in], in whatever floating dtype the file has."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelError when the tensor is missing."""
        ...

    def read(self, name: str, *, rows: Part = WHOLE, columns: Part = WHOLE) -> Tensor:
        """A part of the tensor's first dimension, or of its second. May be a view of the mapped file: read only."""
        ...

    def kinds(self) -> dict[str, str]:
        """The data type of each tensor, as file and format call them; empty where no format is a quantised one."""
        ...

    def groups(self, name: str, *, rows: Part = WHOLE, columns: Part = WHOLE, bits: int | None = None) -> Groups | None:
        """A part of a matrix, quantised as the file has it, where there is such a form (gguf_groups); else None.

        A part of columns is one of whole groups. With `bits` forms of other widths are None, and not decoded.
        """
        ...

    def close(self) -> None: ...
