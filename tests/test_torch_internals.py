"""What is used of PyTorch's insides: all there in this version, and named where it is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hetconv
from hetconv import torch_internals
from hetconv.torch_internals import INTERNALS, TESTED_WITH, Internal

ROOT = Path(__file__).parent.parent
PRIVATE = re.compile(r"torch\._(?!_version__)|torch\.[a-z.]*\._[a-z]|from torch[a-z.]*\._|_make_wrapper_subclass\b")


def test_this_torch_has_all_of_them() -> None:
    missing = [name for name, internal in INTERNALS.items() if torch_internals.find(internal) is None]
    assert set(missing) <= {"checkpoint_saver"}  # which PyTorch 2.13 no longer needs


def test_what_a_later_torch_lacks_is_named_or_done_without() -> None:
    here = re.escape(torch.__version__)
    with pytest.raises(hetconv.HetConvError, match=rf"torch {here} has no torch\._C\.Gone, .*2\.13"):
        torch_internals.find(Internal("torch._C", "Gone", "to do something"))
    with pytest.raises(hetconv.HetConvError, match=r"has no torch\.nowhere\.gone"):
        torch_internals.find(Internal("torch.nowhere", "gone", "to do something"))
    assert torch_internals.find(Internal("torch._C", "Gone", "to be faster", optional=True)) is None


def test_what_is_optional_has_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "find", lambda _: None)
    targets = [torch.zeros(2), torch.zeros(3)]
    torch_internals.foreach_copy_(targets, [torch.ones(2), torch.ones(3)])
    assert all(t.eq(1).all() for t in targets)


def test_the_versions_that_are_tested_are_those_that_can_be_installed() -> None:
    pinned = sorted(path.stem.removeprefix("torch-") for path in (ROOT / "constraints").glob("torch-*.txt"))
    assert pinned == sorted(TESTED_WITH)
    assert all(version in (ROOT / "README.md").read_text("utf-8") for version in TESTED_WITH)


def test_no_other_module_uses_the_insides_of_torch() -> None:
    files = [p for folder in ("hetconv", "kernels", "autotune") for p in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.name}: {line.strip()}"
        for path in files if path.name != "torch_internals.py"
        for line in path.read_text("utf-8").splitlines() if PRIVATE.search(line)
    ]  # fmt: skip
    assert found == []
