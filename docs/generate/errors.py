"""The list of errors: cause and remedy of each, and every message that the code has."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from docs.generate.links import ROOT
from hetconv import errors

FOLDERS = ("autotune", "hetconv", "kernels")
PARTS = re.compile(r"(.*?)\n\nCause: (.*?)\n\nRemedy: (.*)", re.DOTALL)


class Told(NamedTuple):
    """What the docstring of an error says."""

    summary: str
    cause: str
    remedy: str


def named() -> dict[str, type[Exception]]:
    """Returns the errors of `hetconv.errors`, the base first."""
    found = [e for e in vars(errors).values() if _is_error(e)]
    return {e.__name__: e for e in found}


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, errors.HetConvError)


def told(error: type[Exception]) -> Told:
    """Reads the docstring of an error.

    Raises:
        ValueError: it lacks a summary, a cause or a remedy.
    """
    text = inspect.getdoc(error) or ""
    parts = PARTS.fullmatch(text)
    if parts is None:
        raise ValueError(
            f"the docstring of {error.__name__} is {text!r}; write a summary and the "
            "paragraphs 'Cause: ...' and 'Remedy: ...'"
        )
    return Told(*(" ".join(part.split()) for part in parts.groups()))


@cache
def messages() -> dict[str, list[str]]:
    """Returns the messages with which the code raises each error; … stands for a value."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    name = getattr(node.exc.func, "id", "")
                    text = _text(node.exc.args[0]) if node.exc.args else ""
                    found.setdefault(name, set()).add(" ".join(text.split()))
    return {name: sorted(texts) for name, texts in found.items()}


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return _text(left) + _text(right)
    return "…"


def section() -> str:
    """Returns the text of all errors."""
    return "\n\n".join(text for error in named().values() for text in _error(error))


def _error(error: type[Exception]) -> Iterator[str]:
    said = told(error)
    yield f"### {error.__name__}"
    yield said.summary
    yield f"**Cause.** {said.cause}"
    yield f"**Remedy.** {said.remedy}"
    # without messages that are all values, which nobody could look for
    texts = [
        t for t in messages().get(error.__name__, ()) if len(t.replace("…", "")) > 20
    ]
    if texts:
        yield f'??? note "Its {len(texts)} messages"'
        yield "\n".join(f"    - `{text.replace('`', chr(39))}`" for text in texts)
