"""One HTML file that needs nothing else: images inside, no script, no link out, every text escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem;border-bottom:1px solid #ddd}"
    "table{border-collapse:collapse;margin:1rem 0;font-size:.9rem;display:block;overflow-x:auto}"
    "th,td{border:1px solid #ddd;padding:.25rem .6rem;text-align:right;white-space:nowrap}"
    "th{background:#f4f4f4}th:first-child,td:first-child{text-align:left}"
    "img{max-width:100%;height:auto}pre{background:#f4f4f4;padding:.6rem;overflow-x:auto;white-space:pre-wrap}"
)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG and what it shows, for who cannot see it."""

    png: bytes
    shows: str


Block = str | Grid | Picture  # a str is a paragraph of plain text; one that ends in a newline keeps its lines


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    blocks: Sequence[Block]


def render(title: str, sections: Sequence[Section]) -> str:
    """The whole document."""
    body = "".join(f"<h2>{html.escape(section.title)}</h2>\n" + "".join(map(_block, section.blocks)) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}</body></html>\n"
    )


def markdown(grid: Grid) -> str:
    """The table in Markdown."""
    lines = ["| " + " | ".join(map(_cell, grid.headings)) + " |", "|" + "|".join(["---", *["---:"] * (len(grid.headings) - 1)]) + "|"]
    lines.extend("| " + " | ".join(map(_cell, row)) + " |" for row in grid.rows)
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _block(block: Block) -> str:
    if isinstance(block, Picture):
        data = quote(base64.b64encode(block.png), safe="")  # else a picture may spell a word between two slashes
        return f'<p><img alt="{html.escape(block.shows)}" src="data:image/png;base64,{data}"></p>\n'
    if isinstance(block, Grid):
        head = "".join(f"<th>{html.escape(text)}</th>" for text in block.headings)
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in block.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n"
    tag = "pre" if block.endswith("\n") else "p"
    return f"<{tag}>{html.escape(block)}</{tag}>\n"
