"""All code of the documents, also what is not run, is at least written as it must be."""

from __future__ import annotations

import subprocess

import pytest

from docs.generate.commands import commands as known
from docs.generate.commands import options
from tests.documents.pages import PAGES, SHELLS, Block, blocks, commands

ALL = [block for page in PAGES for block in blocks(page)]


def of_hetconv(words: list[str]) -> list[str] | None:
    """The words after ``hetconv`` where a command starts it, by itself or by torchrun."""
    if words[0] == "hetconv":
        return words[1:]
    if words[0] in {"python", "torchrun"} and "hetconv" in words:
        at = words.index("hetconv")
        return words[at + 1 :] if words[at - 1] == "-m" else None
    return None


def unknown_options(words: list[str]) -> list[str]:
    """What a line says to ``hetconv`` that it does not know."""
    if not words or words[0] == "--help":
        return []
    if words[0] not in known():
        return words[:1]
    given = [w.partition("=")[0] for w in words[1:] if w.startswith("-") and len(w) > 1]
    return [w for w in given if w not in {*options(known()[words[0]]), "--help"}]


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_blocks_are_well_formed(block: Block) -> None:
    if block.language in SHELLS:
        done = subprocess.run(
            ["bash", "-n"],
            input=block.text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for words in commands(block.text):
            assert not unknown_options(of_hetconv(words) or []), words
    else:
        compile(block.text, block.where, "exec")


def test_an_option_that_does_not_exist_is_found() -> None:
    line = "python -m hetconv plan --model a:b --wrong 3 -o plan.json \\\n  --kind=x"
    (words,) = commands(line)
    assert unknown_options(of_hetconv(words) or []) == ["--wrong", "--kind"]
    assert unknown_options(["tune", "--budget", "3"]) == ["tune"]
    torchrun = "torchrun --nnodes 2 -m hetconv autotune --devices cpu -q"
    assert of_hetconv(next(commands(torchrun))) == [
        "autotune",
        "--devices",
        "cpu",
        "-q",
    ]
