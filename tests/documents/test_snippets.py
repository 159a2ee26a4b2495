"""The code of the documents runs: a page's blocks in their order, in one empty folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.documents.pages import PAGES, SHELLS, Block, blocks

TIMEOUT_S = 300  # of a block that hangs
PAGE_TIMEOUT_S = 900  # of many blocks, on a machine that does other things too
KEEP_VARIABLES = '\nenv -0 > "$HETCONV_VARIABLES"\n'
MAX_NOT_RUN = 12
# What a reader does once, in an environment of its own, or in a checkout.
ELSEWHERE = re.compile(r"\bpip install\b|^\s*make\b|\.venv/bin/|\bgit clone\b")


def runs(block: Block) -> bool:
    return block.norun is None and not (
        block.language in SHELLS and ELSEWHERE.search(block.text)
    )


OF_A_CHECKOUT = {"README.md", "CONTRIBUTING.md"}
WITH_CODE = [
    page
    for page in PAGES
    if page not in OF_A_CHECKOUT and any(runs(block) for block in blocks(page))
]


def start(block: Block, folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """Runs a block and returns the variables that it leaves."""
    kept = folder / ".variables"
    if block.language in SHELLS:
        command = ["bash", "-euo", "pipefail", "-c", block.text + KEEP_VARIABLES]
    else:
        command = [sys.executable, "-c", block.text]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables | {"HETCONV_VARIABLES": str(kept)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that all that it started can be ended
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        print(said)
        raise
    if process.returncode != 0:
        pytest.fail(f"{block.where} failed:\n{block.text}\n{said}")
    if block.language not in SHELLS:
        return variables
    return dict(v.split("=", 1) for v in kept.read_text().split("\0") if v)


def page_variables(home: Path) -> dict[str, str]:
    """Environment variables of a page's commands."""
    return {
        **{
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("PYTEST", "TRITON"))
        },
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # torchrun then looks for a free port
        "PYTHONDONTWRITEBYTECODE": "",  # dozens of processes import the same modules
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(__file__).parent / 'site'}:{ROOT}",
    }


@pytest.mark.slow
@pytest.mark.timeout(PAGE_TIMEOUT_S)
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    variables = page_variables(tmp_path)
    for block in blocks(page):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif runs(block):
            variables = start(block, tmp_path, variables)


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [b for page in PAGES for b in blocks(page) if b.norun is not None]
    assert all(len(b.norun or "") > 10 for b in left_out), left_out
    assert len(left_out) <= MAX_NOT_RUN, [(b.where, b.norun) for b in left_out]


def test_a_block_that_fails_is_named(tmp_path: Path) -> None:
    failing = Block("page.md", 3, "sh", None, None, "echo before\nfalse\necho after")
    with pytest.raises(
        pytest.fail.Exception, match=r"page.md:3 failed(.|\n)*\nbefore\n$"
    ):
        start(failing, tmp_path, dict(os.environ))
    wrong = failing._replace(language="python", text="raise KeyError('missing')")
    with pytest.raises(pytest.fail.Exception, match="KeyError: 'missing'"):
        start(wrong, tmp_path, dict(os.environ))


def test_exported_variables_hold_for_later_blocks(tmp_path: Path) -> None:
    exporting = Block("page.md", 1, "sh", None, None, "export COLOR='light blue'")
    variables = start(exporting, tmp_path, dict(os.environ))
    assert variables["COLOR"] == "light blue"
    start(exporting._replace(text='[ "$COLOR" = "light blue" ]'), tmp_path, variables)
