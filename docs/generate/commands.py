"""The reference of the command line, from its parser."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from hetconv.autotune.cli.main import app


def commands() -> dict[str, Any]:
    """Returns the parser of each command, by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def options(command: Any) -> dict[str, Any]:
    """Returns the options of a command, by each of their spellings."""
    options = [p for p in command.params if p.param_type_name == "option"]
    return {name: p for p in options for name in (*p.opts, *p.secondary_opts)}


def section() -> str:
    """Returns usage, arguments and options of every command."""
    return "\n\n".join(
        "\n\n".join(_command(name, command)) for name, command in commands().items()
    )


def _command(name: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=f"hetconv {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## hetconv {name}"
    yield inspect.cleandoc(command.help)
    yield f"```text\nhetconv {name} {usage}\n```"
    rows = [p.get_help_record(context) for p in command.params if p.name != "help"]
    if rows:
        lines = (f"| `{_cell(what)}` | {_cell(meaning)} |" for what, meaning in rows)
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *lines])


def _cell(text: str) -> str:
    """For a table; defaults in the home folder are those of any home."""
    return text.replace(str(Path.home()), "~").replace("|", "\\|")
