"""`kernels`, `router`, `cluster` are common names: what keeps ours from getting in the way of others, and others in ours."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
OURS = ("bench", "cluster", "kernels", "replica", "router")


def packages_on_disk() -> set[str]:
    return {str(init.parent.relative_to(ROOT)).replace("/", ".") for top in OURS for init in (ROOT / top).rglob("__init__.py")}


def test_every_package_is_listed_and_nothing_else() -> None:
    assert set(PACKAGES) == packages_on_disk()


def test_inits_are_empty() -> None:
    for package in PACKAGES:
        init = ROOT / package.replace(".", "/") / "__init__.py"
        assert init.read_text() == "", f"{init} is not empty"


def test_version_stays_below_0_10() -> None:
    """transformers takes a distribution named `kernels` of a recent version for the one it knows."""
    major, minor = (int(part) for part in PROJECT["project"]["version"].split(".")[:2])
    assert (major, minor) < (0, 10)
    assert not hasattr(importlib.import_module("kernels"), "__version__")


def test_transformers_llama_imports_beside_us() -> None:
    transformers = pytest.importorskip("transformers")
    assert all(Path(importlib.import_module(top).__file__ or "").parent == ROOT / top for top in OURS)
    assert transformers.LlamaForCausalLM.__name__ == "LlamaForCausalLM"  # imported now, and whatever it needs


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("router.app", ("torch", "ray", "transformers")),
        ("router.server", ("torch", "ray", "transformers")),
        ("replica.engine", ("torch", "ray", "transformers")),
        ("cluster.cli", ("torch", "ray", "transformers")),
    ],
)
def test_heavy_modules_stay_out(module: str, forbidden: tuple[str, ...]) -> None:
    """A router process never pays for torch; deciders never see ray; the command line is quick."""
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
