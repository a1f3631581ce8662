"""A file that a newcomer can read in one sitting: the limits of our style, measured."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bench", "cluster", "kernels", "replica", "router")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 7
METHODS_MAX = 15

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def too_big(source: str) -> Iterator[str]:
    """Every way in which `source` breaks the limits, one line each."""
    lines = source.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{lines} lines (at most {FILE_LINES_MAX})"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.name}: {length} lines (at most {FUNCTION_LINES_MAX})"
            positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
            if len(positional) > PARAMETERS_MAX:
                yield f"{node.name}: {len(positional)} positional parameters (at most {PARAMETERS_MAX}; keyword-only ones are free)"
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and not n.name.startswith("__")]
            if len(methods) > METHODS_MAX:
                yield f"{node.name}: {len(methods)} methods (at most {METHODS_MAX})"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sources_keep_the_limits(path: Path) -> None:
    assert list(too_big(path.read_text())) == []


def test_the_limits_bite() -> None:
    body = "    x = 1\n" * (FUNCTION_LINES_MAX + 1)
    arguments = ", ".join(f"a{i}" for i in range(PARAMETERS_MAX + 1))
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(METHODS_MAX + 1))
    source = f"def f({arguments}):\n{body}\nclass C:\n{methods}" + "\n" * FILE_LINES_MAX
    assert len(list(too_big(source))) == 4
