"""Links and images of the documents lead somewhere. ``mkdocs build`` checks the site itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate import drawings, errors, files, links, terms
from tests import ROOT
from tests.documents import pages
from tests.documents.pages import PAGES, anchors


def generated_anchors(path: Path) -> set[str]:
    """Of what is generated into a page."""
    if path.name == "troubleshoot.md":
        return {name.lower() for name in errors.named()}
    if path.name == "glossary.md":
        return {terms.slug(term) for term in terms.terms()}
    return set()


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    for target, line in pages.links(page):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}:{line}: {target} does not exist"
        if anchor:
            known = anchors(path) | generated_anchors(path)
            assert anchor in known, f"{page}:{line}: {path.name} has no #{anchor}"


def test_drawings_are_those_of_their_script() -> None:
    """Else run: python docs/generate/drawings.py"""
    assert {p.stem for p in drawings.IMAGES.glob("*.svg")} == set(drawings.DRAWINGS)
    for name, draw in drawings.DRAWINGS.items():
        assert (drawings.IMAGES / f"{name}.svg").read_text() == draw().svg()


def test_links_out_of_the_site_become_links_to_copies() -> None:
    text = "[a](../../bench/results/cpu/pair.json), [b](../design.md), [c](../../bench)"
    assert links.to_copies(text, "explanation/x.md") == (
        "[a](../repository/bench/results/cpu/pair.json), [b](../design.md), c (`bench`)"
    )


def test_terms_link_to_the_glossary_where_they_are_first_used() -> None:
    text = "# Halo\n`halo`\n\n```sh\nhalo\n```\nA [halo](x.md) and halos, a halo."
    assert terms.linked(text, "how-to/x.md").endswith(
        "A [halo](x.md) and [halos](../glossary.md#halo){.term}, a halo."
    )
    assert "## A" not in terms.linked("| halo | rows |", "glossary.md")
    assert '<span id="halo">' in terms.linked("| halo | rows |", "glossary.md")


@pytest.mark.parametrize("kind", ["plan", "profile"])
def test_every_key_of_a_file_is_explained(kind: str) -> None:
    rows = [
        line for line in files.section(kind)().splitlines() if line.startswith("| `")
    ]
    assert len(rows) > 20
    assert not [row for row in rows if row.endswith("|  |")]
