"""What a sweep has finished, kept on disk after every load, so that an interrupted one goes on where it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from bench.point import Point
from bench.request_log import SUFFIX, RequestRow, read_rows, write_rows
from bench.sweep import claim

FILE = "state.json"
SCHEMA_VERSION = 1


class ResumeError(ValueError):
    """What lies there is of another sweep, or broken."""


@dataclass(frozen=True, slots=True)
class _Document:
    schema: int
    identity: dict[str, str]
    points: tuple[Point, ...] = ()


@dataclass(slots=True)
class SweepState:
    """A folder with one JSON file and the requests of each finished point. `identity`: all that makes two sweeps the same."""

    folder: Path
    identity: dict[str, str]
    points: list[Point] = field(default_factory=list)
    held: IO[bytes] | None = field(default=None, compare=False)  # as long as it is open, the folder is this process's own

    def add(self, point: Point, rows: Iterable[RequestRow]) -> None:
        """One more finished load. Requests first, the state last and in one move: an interruption leaves the old state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_rows((msgspec.structs.replace(row, point=len(self.points)) for row in rows), self._rows_file(len(self.points)))
        self.points.append(point)
        document = _Document(SCHEMA_VERSION, self.identity, tuple(self.points))
        fresh = self.folder / (FILE + ".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
        os.replace(fresh, self.folder / FILE)

    def rows(self) -> list[RequestRow]:
        """The requests of all finished points."""
        return [row for i in range(len(self.points)) for row in read_rows(self._rows_file(i))]

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def clear(self) -> None:
        """All but the folder and who holds it."""
        for path in self.folder.iterdir():
            if path.name != claim.FILE:
                path.unlink()

    def tidy(self) -> None:
        """Of a sweep that ends: where nothing is finished, nothing is left lying."""
        if not self.points and not (self.folder / FILE).exists():
            self.discard()

    def _rows_file(self, index: int) -> Path:
        return self.folder / f"{index}{SUFFIX}"


def resume(folder: Path, identity: dict[str, str]) -> SweepState:
    """What is finished of the sweep `identity`; an empty state when nothing is there.

    Raises ResumeError, naming what differs, when the folder holds another sweep.
    """
    path = folder / FILE
    if not path.exists():
        return SweepState(folder, identity)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Document)
    except (OSError, msgspec.MsgspecError) as error:
        raise ResumeError(f"{path} cannot be read ({error}); --restart begins anew") from error
    if found.schema != SCHEMA_VERSION:
        raise ResumeError(f"{path} was written by another version; --restart begins anew")
    keys = sorted({*found.identity, *identity})
    differing = [
        f"{key}: {found.identity.get(key, 'not set')} there, {identity.get(key, 'not set')} here"
        for key in keys
        if found.identity.get(key) != identity.get(key)
    ]
    if differing:
        raise ResumeError(f"{folder} holds another sweep ({'; '.join(differing)}); --restart begins anew")
    state = SweepState(folder, identity, list(found.points))
    missing = [i for i in range(len(state.points)) if not (folder / f"{i}{SUFFIX}").exists()]
    if missing:
        raise ResumeError(f"{folder} lacks the requests of point {missing[0]}; --restart begins anew")
    try:
        state.rows()
    except ValueError as error:
        raise ResumeError(f"{folder}: {error}; --restart begins anew") from error
    return state
