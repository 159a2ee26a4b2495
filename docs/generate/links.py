"""Links from pages to files of the repository that are no part of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "repository/"  # where the site has copies of them
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
# What only the tests of snippets read.
NORUN = re.compile(r'^(\s*```\w+.*?) norun="[^"]*"', re.MULTILINE)


def _in_repository(target: str, uri: str) -> str:
    return os.path.normpath(os.path.join("docs", os.path.dirname(uri), target))


def outside(page: Any) -> set[str]:
    """Returns the files outside of ``docs`` that a page links to, from the root."""
    text = Path(page.abs_src_path).read_text(encoding="utf-8")
    paths = {_in_repository(target, page.src_uri) for target in LINK.findall(text)}
    return {p for p in paths if not p.startswith("docs/") and (ROOT / p).is_file()}


def to_copies(text: str, uri: str) -> str:
    """Points links to files outside of ``docs`` to their copies; folders lose theirs."""

    def copied(found: re.Match[str]) -> str:
        path = _in_repository(found[1], uri)
        if path.startswith("docs/") or not (ROOT / path).exists():
            return found[0]
        if (ROOT / path).is_dir():
            return f"FOLDER:{path}"
        return os.path.relpath(PREFIX + path, os.path.dirname(uri) or ".")

    marked = LINK.sub(copied, text)
    return re.sub(r"\[([^\]]*)\]\(FOLDER:([^)]+)\)", r"\1 (`\2`)", marked)


def without_test_options(text: str) -> str:
    """Removes what fences say to the tests alone."""
    return NORUN.sub(r"\1", text)
