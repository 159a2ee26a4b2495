"""Versioned JSON files: parsed once at the door into frozen types, written atomically,
described by a JSON schema.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hetconv.errors import HetConvError

T = TypeVar("T")
Document = dict[str, Any]

STRICT: ConfigDict = {"extra": "forbid", "allow_inf_nan": False}
AtLeastZero = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
_adapters: dict[Any, TypeAdapter[Any]] = {}


def adapter(type_: type[T]) -> TypeAdapter[T]:
    """What reads and writes values of a type; kept, for it takes longer to make than a
    file to read.
    """
    if type_ not in _adapters:
        _adapters[type_] = TypeAdapter(type_)
    return _adapters[type_]


def load(
    path: str | Path, kind: str, version: int, type_: type[T], error: type[HetConvError]
) -> T:
    """Reads a file of this version. Raises ``error``, naming the file and the key, for
    what is not such a file.
    """
    document = _read(path, kind, error)
    if document.get("format") != f"hetconv-{kind}":
        raise error(
            f"{path}: format is {document.get('format')!r}, but a hetconv {kind} file says "
            f"'hetconv-{kind}'"
        )
    found = document.get("version")
    if type(found) is not int or found != version:
        newer = type(found) is int and found > version
        todo = (
            "update hetconv, or make it anew with this one" if newer else "make it anew"
        )
        raise error(
            f"{path}: version is {found!r}, but this hetconv reads version {version}; {todo}"
        )
    del document["format"], document["version"]
    try:
        return adapter(type_).validate_json(json.dumps(document), strict=True)
    except ValidationError as e:
        lines = "; ".join(
            f"{'.'.join(map(str, x['loc'])) or 'the file'}: {x['msg']}"
            for x in e.errors()[:5]
        )
        raise error(f"{path}: {lines}") from e
    except RecursionError as e:
        raise error(
            f"{path}: is nested too deeply; give the path of a hetconv {kind} file"
        ) from e


def _read(path: str | Path, kind: str, error: type[HetConvError]) -> Document:
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
    """Writes the whole file or leaves the old one as it was. Raises `HetConvError` for
    a number that is not finite.
    """
    document = _head(kind, version) | adapter(type(value)).dump_python(
        value, mode="json"
    )
    try:
        text = json.dumps(document, indent=1, allow_nan=False)
    except ValueError as e:
        raise HetConvError(
            f"{path}: a {kind} file holds finite numbers only ({e})"
        ) from e
    write(path, (text + "\n").encode())


def _head(kind: str, version: int) -> Document:
    return {"format": f"hetconv-{kind}", "version": version}


def schema(kind: str, version: int, type_: type[Any]) -> Document:
    """The JSON schema (draft 2020-12) of files of this version."""
    found = adapter(type_).json_schema()
    head = {key: {"const": value} for key, value in _head(kind, version).items()}
    found["properties"] = head | found["properties"]
    found["required"] = [*head, *found["required"]]
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"hetconv {kind}, version {version}",
    }
    return found | about


def write(path: str | Path, content: bytes) -> None:
    """Puts ``content`` in place of the file at once, so that nobody ever finds half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
