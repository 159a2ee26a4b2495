"""The reference of files: a table for each type of a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from docs.generate.links import ROOT

HEADER = {"format": "Kind of file.", "version": "Version of the format."}
ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def section(kind: str) -> Callable[[], str]:
    """Returns what makes the text of a kind of file."""
    return lambda: "\n\n".join(_types(kind))


def _types(kind: str) -> Iterator[str]:
    path = ROOT / "docs" / f"{kind}.schema.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    types = {kind.capitalize(): schema, **schema.get("$defs", {})}
    for name, described in types.items():
        if name != kind.capitalize() or "properties" in described:
            yield _type(kind, name, described)


def _type(kind: str, name: str, described: dict[str, Any]) -> str:
    text = described.get("description", "")
    meanings = HEADER | {n: _plain(said) for n, said in ATTRIBUTE.findall(text)}
    summary = text.partition("\n\nAttributes:")[0]
    required = dict.fromkeys(described.get("required", ()), "yes")
    rows = [
        f"| `{key}` | {_value(kind, value)} | {required.get(key, '')} | {meanings[key]} |"
        for key, value in described.get("properties", {}).items()
    ]
    table = ["| key | value | required | meaning |", "|---|---|---|---|", *rows]
    anchor = f"{{ #{_anchor(kind, name)} }}"
    return "\n\n".join([f"### {name} {anchor}", summary, "\n".join(table)])


def _plain(text: str) -> str:
    """On one line, without what a table or a link would be made of."""
    return re.sub(r"([|\[\]])", r"\\\1", " ".join(text.split()))


def _anchor(kind: str, name: str) -> str:
    return f"{kind}-{name.lower()}"


def _value(kind: str, value: dict[str, Any]) -> str:
    """In words, what a JSON value is."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{_anchor(kind, name)})"
    if "anyOf" in value:
        return " or ".join(_value(kind, one) for one in value["anyOf"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return ", ".join(f"`{json.dumps(one)}`" for one in value["enum"])
    if value.get("type") == "array":
        if "prefixItems" in value:
            return f"[{', '.join(_value(kind, one) for one in value['prefixItems'])}]"
        return f"list of {_value(kind, value.get('items', {}))}"
    if value.get("type") == "object" and "additionalProperties" in value:
        return f"object of {_value(kind, value['additionalProperties'])}"
    return str(value.get("type", "any"))
