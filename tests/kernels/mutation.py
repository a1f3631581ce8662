"""Kernels with one thing about them changed: what a check is worth is whether it sees them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def mutated(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A module of kernels.triton with one thing about it changed."""
    source = Path(module.__file__ or "").read_text()
    assert source.count(old) == 1, f"{old!r} is not what it was"
    path = folder / f"mutated_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # dataclasses look themselves up there
    spec.loader.exec_module(made)
    return made
