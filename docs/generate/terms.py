"""Terms link to the glossary where a page first uses them."""

from __future__ import annotations

import os
import re
from functools import cache

from docs.generate.links import ROOT

GLOSSARY = "glossary.md"
ROW = re.compile(r"^\| ([a-z][^|]*?) \|", re.MULTILINE)
# No term is looked for in these: code, links, images, HTML, headings and tables' rules.
OPAQUE = re.compile(
    r"^(?P<fence>[ \t]*(?:`{3,}|~{3,})).*?^(?P=fence)[ \t]*$"
    r"|^:::.*?(?=^\S|\Z)|^#.*?$|^\s*[!?]{3}.*?$|^\|[-| :]+\|$|<!--.*?-->|`+[^`]+`+|!?\[[^\]]*\]\([^)]*\)(?:\{[^}]*\})?|<[^>]+>|https?://\S+",
    re.MULTILINE | re.DOTALL,
)


def slug(term: str) -> str:
    """Returns the anchor of a term."""
    return re.sub(r"[^a-z]+", "-", term.lower()).strip("-")


@cache
def terms() -> tuple[str, ...]:
    """Returns the terms of the glossary, as its table has them."""
    rows = ROW.findall((ROOT / "docs" / GLOSSARY).read_text(encoding="utf-8"))
    return tuple(row for row in rows if row != "term")


@cache
def _pattern() -> re.Pattern[str]:
    words = {word for term in terms() for word in _spellings(term)}
    return re.compile(
        rf"\b({'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})s?\b",
        re.IGNORECASE,
    )


def _spellings(term: str) -> list[str]:
    """Of "depth, height, width split": each of the three."""
    *first, last = term.split(", ")
    kind = last.rpartition(" ")[2]
    return [*(f"{word} {kind}" for word in first), last]


def linked(text: str, uri: str) -> str:
    """Links each term to the glossary where a page first has it; gives terms anchors there."""
    if uri == GLOSSARY:
        return ROW.sub(
            lambda row: (
                row[0]
                if row[1] == "term"
                else f'| <span id="{slug(row[1])}">{row[1]}</span> |'
            ),
            text,
        )
    home = {word.lower(): slug(term) for term in terms() for word in _spellings(term)}
    glossary = os.path.relpath(GLOSSARY, os.path.dirname(uri) or ".")
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        anchor = home[found[1].lower()]
        if anchor in seen:
            return found[0]
        seen.add(anchor)
        return f"[{found[0]}]({glossary}#{anchor}){{.term}}"

    pieces, end = [], 0
    for opaque in OPAQUE.finditer(text):
        pieces += [_pattern().sub(link, text[end : opaque.start()]), opaque[0]]
        end = opaque.end()
    return "".join([*pieces, _pattern().sub(link, text[end:])])
