"""Nothing is missing from the reference that is generated."""

from __future__ import annotations

import re

import pytest

import hetconv
from docs.generate import api, commands, errors
from hetconv.errors import HetConvError
from tests import ROOT


def test_every_public_name_is_in_one_group_and_every_group_on_a_page() -> None:
    api.check()
    pages = "".join(p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md"))
    assert set(re.findall(r"<!-- generated: api (.+) -->", pages)) == set(api.GROUPS)


def test_a_name_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hetconv, "__all__", [*hetconv.__all__, "new_name"])
    with pytest.raises(SystemExit, match=r"missing \['new_name'\], unknown \[\]"):
        api.check()


def test_every_command_and_option_is_listed() -> None:
    text = commands.section()
    for name, command in commands.commands().items():
        assert f"## hetconv {name}\n" in text
        assert all(option in text for option in commands.options(command))


def test_every_error_has_a_cause_and_a_remedy() -> None:
    text = errors.section()
    named = errors.named()
    assert set(named) == {n for n in hetconv.__all__ if n.endswith("Error")}
    for name, error in named.items():
        assert f"### {name}\n" in text
        assert all(errors.told(error))


def test_an_error_without_a_remedy_is_refused() -> None:
    class OfNobodyError(HetConvError):
        """Something is wrong.

        Cause: Nobody knows.
        """

    with pytest.raises(ValueError, match="write a summary and the paragraphs 'Cause"):
        errors.told(OfNobodyError)


def test_messages_of_an_error_are_read_off_the_code() -> None:
    found = errors.messages()["OutputError"]
    assert any("is a folder; name a file in it" in message for message in found)
    assert len(errors.messages()["HetConvError"]) > 50
