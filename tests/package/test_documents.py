"""What the documents name is there."""

from __future__ import annotations

import re
import subprocess
from functools import cache

import pytest

from tests import ROOT
from tests.documents.pages import PAGES

OF_USERS = {"train.py", "model.module", "model.pt", "my_model.py"}
"""Named in examples: they are the reader's."""
OF_OTHERS = {"DistributedSampler"}
"""Of other libraries."""


@cache
def sources() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {name: ROOT / name for name in listed.stdout.split()}
    return {name: path.read_text() for name, path in files.items() if path.is_file()}


@cache
def words() -> set[str]:
    return {word for text in sources().values() for word in re.findall(r"\w+", text)}


def named_in(document: str) -> set[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return (
        set(re.findall(r"`([A-Za-z_][\w./]*)(?:\(\))?`", text)) - OF_USERS - OF_OTHERS
    )


@pytest.mark.parametrize("document", PAGES)
def test_files_that_a_document_names_exist(document: str) -> None:
    files = {name for name in named_in(document) if name.endswith(".py")}
    missing = {
        name
        for name in files
        if not any(f"/{path}".endswith(f"/{name}") for path in sources())
    }
    assert not missing


@pytest.mark.parametrize("document", PAGES)
def test_symbols_that_a_document_names_are_defined(document: str) -> None:
    symbols = {name for name in named_in(document) if re.fullmatch(r"[\w.]+", name)}
    symbols = {name for name in symbols if not name.endswith((".py", ".md", ".toml"))}
    missing = {name for name in symbols if not words() >= set(name.split("."))}
    assert not missing
