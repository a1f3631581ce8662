"""The tile tables in docs/kernels, written from the code that serves.

python -m bench.kernels.pages            says which pages tell other tiles than the code
python -m bench.kernels.pages --write    brings them to what the code has
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kernels.triton import (
    attention_tiles,
    copy_blocks,
    fused_moe,
    gelu_mul,
    linear_quantized,
    matmul_batch_invariant,
    rms_norm,
    rope_kv_write,
    sampling,
    silu_mul,
)
from kernels.triton.tiles import EVERYWHERE, TileTable, name_of

DIRECTORY = Path(__file__).parents[2] / "docs" / "kernels"
PAGES: dict[str, tuple[TileTable, ...]] = {
    "rms_norm": (rms_norm.TILES,),
    "rope_kv_write": (rope_kv_write.TILES,),
    "paged_attention": (attention_tiles.SPLIT_TILES, attention_tiles.REDUCE_TILES, attention_tiles.CHUNK_TILES),
    "silu_mul": (silu_mul.TILES,),
    "gelu_mul": (gelu_mul.TILES,),
    "copy_blocks": (copy_blocks.TILES,),
    "matmul_batch_invariant": (matmul_batch_invariant.TILES,),
    "linear_quantized": (linear_quantized.TILES,),
    "fused_moe": (fused_moe.TILES, fused_moe.DOWN_TILES),
    "sampling": (sampling.TILES, sampling.CHOOSE_TILES),
}


def table_of(table: TileTable) -> str:
    """Between two comments, by which it is found again."""
    lines = [f"<!-- tiles of {table.kernel} -->", "| architectures | dtypes | size ≤ | tile |", "|---|---|---|---|"]
    for row in table.rows:
        places = "all" if row.architectures == EVERYWHERE else ", ".join(row.architectures)
        sides = ", ".join(f"{side} {value}" for side, value in asdict(row.tile).items() if value)
        lines.append(f"| {places} | {', '.join(map(name_of, row.dtypes))} | {row.size_max or 'any'} | {sides} |")
    return "\n".join([*lines, "<!-- end of tiles -->"])


def with_tables(text: str, tables: Sequence[TileTable]) -> str:
    """The page with its tables as the code has them; ones that it lacks are added under a heading at its end."""
    for table in tables:
        found = re.compile(rf"<!-- tiles of {re.escape(table.kernel)} -->.*?<!-- end of tiles -->", re.DOTALL)
        made = table_of(table)
        if found.search(text):
            text = found.sub(made.replace("\\", r"\\"), text)
        else:
            heading = "" if "## Tile tables" in text else "\n## Tile tables\n"
            text = f"{text.rstrip()}\n{heading}\n{table.kernel}:\n\n{made}\n"
    return text


def stale(directory: Path = DIRECTORY) -> list[str]:
    """Pages that are missing, or that tell other tiles than the code."""
    named = ((name, directory / f"{name}.md", tables) for name, tables in PAGES.items())
    return [name for name, path, tables in named if not path.exists() or with_tables(path.read_text(), tables) != path.read_text()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    names = stale()
    if parser.parse_args(argv).write:
        for name in names:
            path = DIRECTORY / f"{name}.md"
            path.write_text(with_tables(path.read_text(), PAGES[name]))
            print(f"{path.name}: written")
        return 0
    print("\n".join(f"{name}.md tells other tiles than the code" for name in names))
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
