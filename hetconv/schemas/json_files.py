"""Versioned JSON files.

Files are parsed once into frozen types, written atomically, and described by a JSON
schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hetconv.errors import HetConvError

from .output_file import write

T = TypeVar("T")
Document = dict[str, Any]
MAX_REPORTED_PROBLEMS = 5

STRICT: ConfigDict = {"extra": "forbid", "allow_inf_nan": False}
AtLeastZero = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
_adapters: dict[Any, TypeAdapter[Any]] = {}


def adapter(type_: type[T]) -> TypeAdapter[T]:
    """Returns the pydantic adapter of a type.

    Adapters are cached, for making one takes longer than reading a file.

    Args:
        type_: Type to read and write.
    """
    if type_ not in _adapters:
        _adapters[type_] = TypeAdapter(type_)
    return _adapters[type_]


def load(
    path: str | Path, kind: str, version: int, type_: type[T], error: type[HetConvError]
) -> T:
    """Reads a file of one version.

    Args:
        path: File to read.
        kind: Kind of file, such as "plan".
        version: Version that is expected.
        type_: Type of the content.
        error: Type of the exception to raise.

    Returns:
        The content.

    Raises:
        HetConvError: As ``error``, naming the file and the key, if it is not such a file.
    """
    document = _read_document(path, kind, error)
    if document.get("format") != f"hetconv-{kind}":
        raise error(
            f"{path}: format is {document.get('format')!r}, but a hetconv {kind} file says "
            f"'hetconv-{kind}'"
        )
    found = document.get("version")
    if type(found) is not int or found != version:
        todo = "make it anew"
        if type(found) is int and found > version:
            todo = "update hetconv, or make it anew with this one"
        raise error(
            f"{path}: version is {found!r}, but this hetconv reads version {version}; {todo}"
        )
    del document["format"], document["version"]
    try:
        return adapter(type_).validate_json(json.dumps(document), strict=True)
    except ValidationError as e:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
            for problem in e.errors()[:MAX_REPORTED_PROBLEMS]
        ]
        raise error(f"{path}: {'; '.join(problems)}") from e
    except RecursionError as e:
        raise error(
            f"{path}: is nested too deeply; give the path of a hetconv {kind} file"
        ) from e


def format_of(path: str | Path) -> str | None:
    """Returns which format a file says it has, such as "hetconv-plan"; None if it says none."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    found = document.get("format") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def _read_document(path: str | Path, kind: str, error: type[HetConvError]) -> Document:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise error(
            f"{path}: cannot be read ({e.strerror}); give the path of a hetconv {kind} file"
        ) from e
    except ValueError as e:
        raise error(
            f"{path}: is not JSON ({e}); give the path of a hetconv {kind} file"
        ) from e
    except RecursionError as e:
        raise error(
            f"{path}: is nested too deeply; give the path of a hetconv {kind} file"
        ) from e
    if not isinstance(document, dict):
        raise error(
            f"{path}: format is {type(document).__name__!r}, but a hetconv {kind} file says "
            f"'hetconv-{kind}'"
        )
    return document


def save(path: str | Path, kind: str, version: int, value: Any) -> None:
    """Writes a file as a whole, or leaves the old one as it was.

    Args:
        path: File to write.
        kind: Kind of file, such as "plan".
        version: Version to write.
        value: Content.

    Raises:
        HetConvError: If a number is not finite.
    """
    document = _header(kind, version) | adapter(type(value)).dump_python(
        value, mode="json"
    )
    try:
        text = json.dumps(document, indent=1, allow_nan=False)
    except ValueError as e:
        raise HetConvError(
            f"{path}: a {kind} file holds finite numbers only ({e})"
        ) from e
    write(path, (text + "\n").encode())


def _header(kind: str, version: int) -> Document:
    return {"format": f"hetconv-{kind}", "version": version}


def schema(kind: str, version: int, type_: type[Any]) -> Document:
    """Returns the JSON schema (draft 2020-12) of files of one version.

    Args:
        kind: Kind of file, such as "plan".
        version: Version of the files.
        type_: Type of the content.
    """
    found = adapter(type_).json_schema()
    header = {key: {"const": value} for key, value in _header(kind, version).items()}
    return found | {
        "properties": header | found["properties"],
        "required": [*header, *found["required"]],
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"hetconv {kind}, version {version}",
    }
