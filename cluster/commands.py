"""Commands that other packages add to `rantang` by the entry-point group `rantang.commands`: each a Typer, loaded when asked for."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import typer
from typer.core import TyperGroup

GROUP = "rantang.commands"


class CommandsOfOthers(TyperGroup):
    """Own commands are found first and cost nothing; only an unknown name, or help, looks for entry points."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(importlib.metadata.entry_points(group=GROUP).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = list(importlib.metadata.entry_points(group=GROUP, name=cmd_name))
        return typer.main.get_command(found[0].load()) if found else None
