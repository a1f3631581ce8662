"""The one shape of every result file: what ran, on what machine, from which commit, and the figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from bench.console import new_console
from bench.out_folder import writing
from bench.point import Point
from bench.request_log import SUFFIX, RequestRow, read_rows, write_rows
from bench.summary import Summary

SCHEMA_VERSION = 2  # 1 had no points; a reader of 2 reads it
NAME_BYTES_MAX = 160  # of a file, before date and kind
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "ray", "uvloop", "httptools", "msgspec")


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure, the bound it should keep, and whether it does (None: no bound)."""

    name: str
    value: float | None
    unit: str
    bound: str = ""  # e.g. "<= 200"
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class WorkResult:
    name: str
    description: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run. `details` is free-form evidence that a reader may want and no tool compares."""

    name: str
    configuration: dict[str, str]
    works: tuple[WorkResult, ...] = ()
    metrics: tuple[Metric, ...] = ()
    details: dict[str, object] = field(default_factory=dict)
    points: tuple[Point, ...] = ()

    @property
    def holds(self) -> bool:
        """No metric breaks its bound."""
        return all(metric.holds is not False for metric in self.metrics)


def at_most(name: str, value: float | None, bound: float, unit: str) -> Metric:
    """A metric that must not exceed `bound`; not measured counts as broken."""
    return Metric(name, _rounded(value), unit, f"<= {bound:g}", value is not None and value <= bound)


def at_least(name: str, value: float | None, bound: float, unit: str) -> Metric:
    return Metric(name, _rounded(value), unit, f">= {bound:g}", value is not None and value >= bound)


def plain(name: str, value: float | None, unit: str) -> Metric:
    return Metric(name, _rounded(value), unit)


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A result as it was written: what ran, when, where and from which commit, and the figures."""

    schema: int
    date: str
    commit: str
    command: str
    machine: dict[str, str | int | float]
    name: str
    configuration: dict[str, str]
    works: tuple[WorkResult, ...] = ()
    metrics: tuple[Metric, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    requests_file: str | None = None  # beside it; read by `load_requests`


def write(result: Result, folder: Path = RESULTS, rows: Iterable[RequestRow] = ()) -> Path:
    """Write the result as JSON, and its requests beside it; the path, of a name that no other result has."""
    now = datetime.datetime.now(datetime.UTC)
    folder.mkdir(parents=True, exist_ok=True)
    name = result.name.encode()[:NAME_BYTES_MAX].decode(errors="ignore")  # of many traces it may be longer than a file's may
    path = new_file(folder, f"{name}-{now:%Y%m%d-%H%M%S}")
    try:
        _fill(path, result, now, list(rows))
    except BaseException:
        for left in (path, path.with_name(path.stem + SUFFIX)):  # half a result is none
            left.unlink(missing_ok=True)
        raise
    return path


def new_file(folder: Path, stem: str) -> Path:
    """`STEM.json`, or with a number where a result of the same second has that name; it is there, empty, and nobody else's."""
    path, number = folder / f"{stem}.json", 1
    while True:
        try:
            path.open("xb").close()
        except FileExistsError:
            number += 1
            path = folder / f"{stem}-{number}.json"
        else:
            return path


def _fill(path: Path, result: Result, now: datetime.datetime, kept: Sequence[RequestRow]) -> None:
    requests_file = path.with_name(path.stem + SUFFIX) if kept else None
    if requests_file is not None:
        write_rows(kept, requests_file)
    document = {
        "schema": SCHEMA_VERSION,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command_line(sys.argv),
        "machine": machine(),
        "requests_file": requests_file and requests_file.name,
        **asdict(result),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")  # strict: infinities become null


def load_result(path: Path) -> ResultFile:
    """Raises ValueError, naming the file, for what is no result of this or an earlier schema."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path.name} is no result file: {error}") from error
    if found.schema > SCHEMA_VERSION:
        raise ValueError(f"{path.name} has schema {found.schema}; this version reads up to {SCHEMA_VERSION}")
    if any(not point.repeats for point in found.points):
        raise ValueError(f"{path.name} holds a point without any run")
    return found


def load_requests(path: Path) -> list[RequestRow]:
    """The requests of the result file `path`; none when it kept none. Raises ValueError for a broken file."""
    name = load_result(path).requests_file
    return read_rows(path.with_name(Path(name).name)) if name else []


def show(result: Result, folder: Path = RESULTS) -> None:
    """Print the metrics as a table, and write the file."""
    table = Table(title=result.name)
    for heading in ("metric", "value", "unit", "bound", ""):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for metric in result.metrics:
        mark = {None: Text(), True: Text("holds", "green"), False: Text("BROKEN", "red")}[metric.holds]
        table.add_row(metric.name, "–" if metric.value is None else f"{metric.value:g}", metric.unit, metric.bound, mark)
    console = new_console()
    console.print(table)
    with writing(folder):
        path = write(result, folder)
    console.print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}")


def command_line(argv: list[str]) -> str:
    """The command as it may be published: paths below the project relative, others by their last part, hosts and keys left out."""
    module = Path(argv[0]).resolve()
    if module.is_relative_to(ROOT) and module.suffix == ".py":
        start = "python -m " + ".".join(module.relative_to(ROOT).with_suffix("").parts)
    else:
        start = module.name
    arguments = ["KEY" if before == "--api-key" else public(argument) for before, argument in zip(["", *argv[1:]], argv[1:], strict=False)]
    return " ".join([start, *(shlex.quote(argument) for argument in arguments)])


def public(argument: str) -> str:
    """One argument as it may be published."""
    if argument.startswith("--api-key="):
        return "--api-key=KEY"
    argument = re.sub(r"(https?://)[^/\s]*@", r"\1", argument)
    argument = re.sub(r"(https?://)(?!127\.0\.0\.1|localhost)[^/:\s]+", r"\1HOST", argument)
    return re.sub(r"(?<![^=,])/[^,]*", _public_path, argument)


def _public_path(match: re.Match[str]) -> str:
    path = Path(match.group())
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def machine() -> dict[str, str | int | float]:
    """The machine, without anything that names it."""
    description: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    for package in PACKAGES:
        try:
            description[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            description[package] = "absent"
    return description


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Short commit, with a mark when the tree differs from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
