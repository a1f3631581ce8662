"""Matrices in eight or four bits whose products are taken with activations of sixteen: read, quantised, laid out for linear_quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.packed import GROUP, Groups
from kernels.reference.quantized_weight import QuantizedWeight, groups_of, pack_groups, quantize_fp8
from replica.models.weight_source import WHOLE, Part, WeightSource

BITS: Mapping[str, int] = {"w8a16": 8, "w4a16": 4}  # by groups; fp8 has a scale for each row


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the tensor `name`."""

    name: str
    rows: Part = WHOLE
    columns: Part = WHOLE


def read_quantized(source: WeightSource, pieces: Sequence[Piece], quantization: str, device: torch.device) -> QuantizedWeight:
    """The pieces one below the other, on `device`, where they are quantised: from the file's own precision, or as the file has them."""
    bits = BITS.get(quantization)
    if bits is None:
        return quantize_fp8(torch.cat([_read(source, piece, device) for piece in pieces]))
    found = [_groups(source, piece, bits, device) for piece in pieces]
    minima = [each.m for each in found if each.m is not None]
    joined = Groups(torch.cat([each.q for each in found]), torch.cat([each.d for each in found]), torch.cat(minima) if minima else None)
    first = pieces[0]
    columns = source.shape(first.name)[1] // first.columns.count
    return pack_groups(joined, columns)


def _read(source: WeightSource, piece: Piece, device: torch.device) -> Tensor:
    return source.read(piece.name, rows=piece.rows, columns=piece.columns).to(device)


def _groups(source: WeightSource, piece: Piece, bits: int, device: torch.device) -> Groups:
    own = _own_groups(source, piece, bits)
    if own is None:
        return groups_of(_read(source, piece, device), bits)
    return Groups(own.q.to(device), own.d.to(device), None if own.m is None else own.m.to(device))


def _own_groups(source: WeightSource, piece: Piece, bits: int) -> Groups | None:
    """The piece as the file has it; None where it has other bits, or where the part cuts a group."""
    if source.shape(piece.name)[1] % (GROUP * piece.columns.count):
        return None
    return source.groups(piece.name, rows=piece.rows, columns=piece.columns, bits=bits)
