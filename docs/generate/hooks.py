"""Hooks of mkdocs: pages get what is generated of the code when the site is built.

A line ``<!-- generated: NAME -->`` in a page is replaced by the text of that name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where docs is found

from docs.generate import api, commands, errors, files, links, terms

SECTIONS = {
    **{f"api {group}": api.section(group) for group in api.GROUPS},
    "commands": commands.section,
    "errors": errors.section,
    "schema plan": files.section("plan"),
    "schema profile": files.section("profile"),
}
MARK = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)


def on_pre_build(**_: Any) -> None:
    """Refuses a public name that no page of the reference has."""
    api.check()


def on_files(found: Any, *, config: Any) -> Any:
    """Adds the files of the repository, outside of ``docs``, that pages link to."""
    for path in sorted(
        {path for f in found.documentation_pages() for path in links.outside(f)}
    ):
        copy = File.generated(
            config, links.PREFIX + path, abs_src_path=str(links.ROOT / path)
        )
        found.append(copy)
    return found


def on_page_markdown(text: str, *, page: Any, **_: Any) -> str:
    """Fills in generated sections, then links terms to the glossary."""
    uri = page.file.src_uri
    text = links.to_copies(links.without_test_options(text), uri)
    text = MARK.sub(lambda found: SECTIONS[found[1]](), text)
    return terms.linked(text, uri)
