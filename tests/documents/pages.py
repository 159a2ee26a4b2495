"""The documents, and their code blocks.

A fence says what is done with its block:

- ```` ```python title="FILE" ```` is a file, which later blocks use;
- ```` ```python ```` is run as a program;
- ```` ```sh ```` is run by bash; what it exports holds for later blocks;
- ``norun="REASON"`` beside one of these: it is checked, and not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

from tests import ROOT

SHELLS = {"sh", "bash", "console"}
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
)


class Block(NamedTuple):
    """A code block of a document; ``line`` is where its fence begins."""

    page: str
    line: int
    language: str
    title: str | None
    norun: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Code blocks of a page that are Python or shell, in their order."""
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text(encoding="utf-8"))
    found = []
    for token in tokens:
        if token.type == "fence" and token.map is not None:
            language = token.info.partition(" ")[0]
            options = dict(re.findall(r'(\w+)="([^"]*)"', token.info))
            if language in {"python", *SHELLS}:
                given = options.get("title"), options.get("norun")
                line = token.map[0] + 1
                found.append(Block(page, line, language, *given, token.content))
    return tuple(found)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        command: list[str] = []
        for word in [*words, ";"]:
            if word in {";", "&&", "||", "|", ">", "true"}:
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def links(page: str) -> Iterator[tuple[str, int]]:
    """Targets of the links and images of a page, with the line of their block."""
    parser = MarkdownIt("commonmark").enable("table")
    for block in parser.parse((ROOT / page).read_text(encoding="utf-8")):
        for token in block.children or ():
            target = token.attrGet(
                {"link_open": "href", "image": "src"}.get(token.type, "")
            )
            if isinstance(target, str) and not re.match(r"[a-z]+:", target):
                yield target, (block.map or [0])[0] + 1


def anchors(path: Path) -> set[str]:
    """The anchors that headings of a file have."""
    parser = MarkdownIt("commonmark")
    tokens = parser.parse(path.read_text(encoding="utf-8"))
    found = set()
    for opened, inline in pairwise(tokens):
        if opened.type == "heading_open":
            kept = re.sub(r"[^\w\s-]", "", inline.content.lower()).strip()
            found.add(re.sub(r"[\s-]+", "-", kept))
    return found
