"""A command whose options are given once each: of two values one would be dropped without a word."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class EachOnce(TyperCommand):
    """Refuses an option that takes one value and is given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_twice(self, ctx, args)
        return super().parse_args(ctx, args)


class EachOnceGroup(TyperGroup):
    """The same for a command that has others below it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_twice(self, ctx, args)
        return super().parse_args(ctx, args)


def refuse_twice(command: TyperCommand | TyperGroup, ctx: Any, args: list[str]) -> None:
    """Raises BadParameter."""
    _, _, order = command.make_parser(ctx).parse_args(args=list(args))
    seen = set()
    for parameter in order:
        if parameter.name in seen and parameter.param_type_name == "option" and not getattr(parameter, "multiple", False):
            raise typer.BadParameter(f"{parameter.opts[0]} is given twice", ctx=ctx)
        seen.add(parameter.name)
