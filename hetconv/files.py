"""Versioned JSON files: parsed once at the door into frozen types, written atomically."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from .errors import HetConvError

T = TypeVar("T")


def load(path: str | Path, kind: str, version: int, type_: type[T], error: type[HetConvError]) -> T:
    """Raises ``error``, naming the file and the key, for what is not a ``kind`` file of this version."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise error(f"{path}: cannot be read ({e.strerror}); give the path of a hetconv {kind} file") from e
    except ValueError as e:
        raise error(f"{path}: is not JSON ({e}); give the path of a hetconv {kind} file") from e
    if not isinstance(document, dict) or document.get("format") != f"hetconv-{kind}":
        said = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise error(f"{path}: format is {said!r}, but a hetconv {kind} file says 'hetconv-{kind}'")
    if document.get("version") != version:
        raise error(
            f"{path}: version is {document.get('version')!r}, but this hetconv reads version {version}; make it anew"
        )
    del document["format"], document["version"]
    try:
        return TypeAdapter(type_).validate_json(json.dumps(document), strict=False)
    except ValidationError as e:
        lines = "; ".join(f"{'.'.join(map(str, x['loc'])) or 'the file'}: {x['msg']}" for x in e.errors()[:5])
        raise error(f"{path}: {lines}") from e


def save(path: str | Path, kind: str, version: int, value: Any) -> None:
    """Writes the whole file or leaves the old one as it was."""
    head = {"format": f"hetconv-{kind}", "version": version}
    document = head | TypeAdapter(type(value)).dump_python(value, mode="json")
    write(path, (json.dumps(document, indent=1) + "\n").encode())


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
