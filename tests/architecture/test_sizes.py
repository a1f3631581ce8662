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
            if len(positional) > PARAMETERS_MAX and not is_kernel(node):
                yield f"{node.name}: {len(positional)} positional parameters (at most {PARAMETERS_MAX}; keyword-only ones are free)"
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and not n.name.startswith("__")]
            if len(methods) > METHODS_MAX:
                yield f"{node.name}: {len(methods)} methods (at most {METHODS_MAX})"


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel takes every pointer, stride and constant by itself, and its language has no keyword-only parameters."""
    return any(ast.unparse(decorator).partition("(")[0] == "triton.jit" for decorator in node.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sources_keep_the_limits(path: Path) -> None:
    assert list(too_big(path.read_text())) == []


def test_the_limits_bite() -> None:
    body = "    x = 1\n" * (FUNCTION_LINES_MAX + 1)
    arguments = ", ".join(f"a{i}" for i in range(PARAMETERS_MAX + 1))
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(METHODS_MAX + 1))
    source = f"def f({arguments}):\n{body}\nclass C:\n{methods}" + "\n" * FILE_LINES_MAX
    assert len(list(too_big(source))) == 4
    kernel = f"@triton.jit(debug=True)\ndef kernel({arguments}): ...\n@triton.jit\ndef other({arguments}): ...\n"
    assert list(too_big(kernel)) == [] and len(list(too_big(kernel.replace("triton.jit", "jit")))) == 2
