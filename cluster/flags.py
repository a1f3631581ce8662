"""Command-line flags, one per field of the configuration tree: `max_num_seqs` is `--max-num-seqs`.

Values are passed on as text and checked by the tree itself, so a fault reads the same in a file and on the command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo

from cluster.config import SECTIONS

RENAMED = {"api_keys": "api_key"}  # vLLM's name, given once per key
HIDDEN = {"model"}  # also a positional argument
PANELS = {"engine": "Engine", "router": "Router", "serve": "Cluster"}


def field_of_flag() -> dict[str, tuple[str, str]]:
    """Parameter name → (section, field). Fields have different names across sections, so flags need no prefix."""
    table: dict[str, tuple[str, str]] = {}
    for section, model in SECTIONS.items():
        for field in model.model_fields:
            name = RENAMED.get(field, field)
            if name in table:
                raise RuntimeError(f"two sections have a field {name!r}")
            table[name] = (section, field)
    return table


def with_config_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `flags` of a command by one option per field; it receives {section: {field: value}} of those given."""
    table = field_of_flag()
    own = [parameter for parameter in inspect.signature(function, eval_str=True).parameters.values() if parameter.name != "flags"]

    def command(**values: Any) -> None:
        given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        rest: dict[str, Any] = {}
        for name, value in values.items():
            if name not in table:
                rest[name] = value
            elif value is not None and value != ():
                section, field = table[name]
                given[section][field] = tuple(value) if isinstance(value, list) else value
        function(**rest, flags=given)

    options = [_option(name, section, SECTIONS[section].model_fields[field]) for name, (section, field) in table.items()]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command


def _option(name: str, section: str, field: FieldInfo) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    text = f"{field.description} [default: {_shown_default(field)}]"
    annotation: Any
    if bool in (field.annotation, *get_args(field.annotation)):
        info = typer.Option(f"{flag}/--no-{flag[2:]}", help=text, rich_help_panel=PANELS[section], show_default=False)
        annotation = Annotated[bool | None, info]
    elif name in RENAMED.values():
        info = typer.Option(flag, help=text, rich_help_panel=PANELS[section], show_default=False, envvar="RANTANG_API_KEY")
        annotation = Annotated[list[str] | None, info]
    else:
        info = typer.Option(
            flag, help=text, metavar=_metavar(field), rich_help_panel=PANELS[section], show_default=False, hidden=name in HIDDEN
        )
        annotation = Annotated[str | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(field: FieldInfo) -> str:
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    if choices:
        return "|".join(choices)
    kinds = {field.annotation, *get_args(field.annotation)}
    return "INT" if int in kinds else "FLOAT" if float in kinds else "TEXT"


def _shown_default(field: FieldInfo) -> str:
    default = field.get_default()
    return "unset" if default is None else "none" if default == () else str(default).lower() if isinstance(default, bool) else str(default)
