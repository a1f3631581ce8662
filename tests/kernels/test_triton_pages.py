"""Every kernel has its page, and a page tells what the code has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bench.kernels.pages import DIRECTORY, PAGES, stale, table_of, with_tables
from kernels.ops import Operators
from kernels.triton.tiles import EVERYWHERE, FLOATS, Tile, TileRow, TileTable
from tests.kernels import triton_interpreter  # noqa: F401 - kernels are interpreted here

OTHERS = {"name", "title", "check", "plan_attention", "draws"}  # fields of Operators that are no kernels
TABLE = TileTable("toy", (TileRow(EVERYWHERE, FLOATS, Tile(n=64)), TileRow(("sm_90",), (torch.float16,), Tile(m=16, warps=8), 128)))


def test_every_operator_has_its_page_and_the_index_names_it() -> None:
    kernels = {field.name for field in dataclasses.fields(Operators)} - OTHERS
    assert kernels == set(PAGES) == {path.stem for path in DIRECTORY.glob("*.md")} - {"README"}
    index = (DIRECTORY / "README.md").read_text()
    assert all(f"]({name}.md)" in index for name in kernels)


def test_tile_tables_are_those_of_the_code() -> None:
    assert stale() == [], "python -m bench.kernels.pages --write"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_gives_formula_bytes_and_whether_it_was_measured(name: str) -> None:
    text = (DIRECTORY / f"{name}.md").read_text()
    assert f"# `{name}`" in text and "\n    " in text and "bytes" in text.lower()
    assert "not measured on a GPU yet" in text or "bench/results/gpu-" in text


def test_a_table_that_the_code_has_changed_is_found(tmp_path: Path) -> None:
    page = with_tables("# `toy`\n\nText.\n", (TABLE,))
    assert table_of(TABLE) in page and with_tables(page, (TABLE,)) == page and page.startswith("# `toy`\n\nText.\n")
    changed = TileTable("toy", (TileRow(EVERYWHERE, FLOATS, Tile(n=128)),))
    assert with_tables(page, (changed,)) != page and with_tables(with_tables(page, (changed,)), (TABLE,)) == page
    assert set(stale(tmp_path)) == set(PAGES), "pages that are not there"
