"""The terminal that results are printed to. What users, files and servers call themselves is shown as it is."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

WIDTH = 160  # of what is no terminal


class PlainConsole(Console):
    """Brackets are no markup, words between colons no pictures, and control characters move no cursor; in tables and titles too."""

    def render_str(self, text: str, **options: Any) -> Text:
        options |= {"markup": False, "emoji": False, "highlight": False, "highlighter": None}
        return super().render_str(visible(text), **options)


def visible(text: str) -> str:
    """With a sign in place of each control character but the end of a line."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


def new_console() -> Console:
    return PlainConsole(width=None if sys.stdout.isatty() else WIDTH)
