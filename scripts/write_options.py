"""Write the tables of docs/options.md from the command line itself: `python scripts/write_options.py`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo

from paceline import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
BEGIN, END = "<!-- begin: written by scripts/write_options.py -->\n", "<!-- end -->\n"


def kind(hint: Any) -> str:
    """The type of its value: TEXT, INT, FLOAT or PATH; empty for a flag."""
    plain = next(one for one in (typing.get_args(hint) or (hint,)) if one is not type(None))
    if typing.get_origin(plain) is list:
        return kind(typing.get_args(plain)[0])
    return {bool: "", str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}[plain]


def rows(function: Callable[..., Any]) -> list[str]:
    """A line for each argument and option: how it is given, its default, what it means."""
    hints, lines = typing.get_type_hints(function, include_extras=True), []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "context":
            continue
        hint, info = typing.get_args(hints[name])
        needed = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            given = name.upper() + ("..." if typing.get_origin(hint) is list else "")
        else:
            decls = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
            given = f"{', '.join(decls) or '--' + name.replace('_', '-')} {kind(hint)}".strip()
        without = (
            "required"
            if needed
            else ""
            if parameter.default is None or parameter.default is False
            else f"`{parameter.default}`"
        )
        lines.append(f"| `{given}` | {without} | {info.help} |")
    return lines


def tables() -> str:
    """A section for every command."""
    sections = []
    for command in cli.app.registered_commands:
        function = command.callback
        assert function
        about = " ".join((inspect.getdoc(function) or "").partition("Example")[0].split())
        table = rows(function)
        head = ["", "| | default | |", "|---|---|---|"] if table else []
        sections.append("\n".join([f"### paceline {command.name or function.__name__}\n", about, *head, *table]))
    return "\n\n".join(sections)


def page(old: str) -> str:
    """The whole page, its tables as they should be."""
    before, rest = old.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
