"""What is used of PyTorch's insides: all there in this version, and named where it is not."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import torch

import hetconv
from hetconv import torch_internals, torch_patches
from hetconv.torch_internals import INTERNALS, TESTED_WITH, Internal
from tests import ROOT
from tests.spawn import on_ranks

PRIVATE = re.compile(
    r"torch\._(?!_version__)|torch\.[a-z.]*\._[a-z]|from torch[a-z.]*\._|_make_wrapper_subclass\b"
)


def test_this_torch_has_all_of_them() -> None:
    missing = [
        name
        for name, internal in INTERNALS.items()
        if torch_internals.find(internal) is None
    ]
    assert set(missing) <= {"checkpoint_saver"}  # which PyTorch 2.13 no longer needs


def test_what_a_later_torch_lacks_is_named_or_done_without() -> None:
    here = re.escape(torch.__version__)
    with pytest.raises(
        hetconv.HetConvError, match=rf"torch {here} has no torch\._C\.Gone, .*2\.13"
    ):
        torch_internals.find(Internal("torch._C", "Gone", "to do something"))
    with pytest.raises(hetconv.HetConvError, match=r"has no torch\.nowhere\.gone"):
        torch_internals.find(Internal("torch.nowhere", "gone", "to do something"))
    assert (
        torch_internals.find(
            Internal("torch._C", "Gone", "to be faster", optional=True)
        )
        is None
    )


def test_what_is_optional_has_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "find", lambda _: None)
    targets = [torch.zeros(2), torch.zeros(3)]
    torch_internals.foreach_copy_(targets, [torch.ones(2), torch.ones(3)])
    assert all(t.eq(1).all() for t in targets)


def test_the_versions_that_are_tested_are_those_that_can_be_installed() -> None:
    pinned = sorted(
        path.stem.removeprefix("torch-")
        for path in (ROOT / "constraints").glob("torch-*.txt")
    )
    assert pinned == sorted(TESTED_WITH)
    assert all(
        version in (ROOT / "README.md").read_text("utf-8") for version in TESTED_WITH
    )


def test_no_other_module_uses_the_insides_of_torch() -> None:
    files = [
        p
        for folder in ("hetconv", "kernels", "autotune")
        for p in (ROOT / folder).rglob("*.py")
    ]
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        if path.name != "torch_internals.py"
        for line in path.read_text("utf-8").splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []


def _replaced() -> tuple[object, ...]:
    function = torch.autograd.Function
    apply = inspect.getattr_static(function, "apply")
    return (
        apply,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
        torch.amp.GradScaler._unscale_grads_,
    )


def _before_with_and_without_a_group() -> tuple[bool, bool, bool]:
    from hetconv.comm.rank_group import rank_group_of

    torch_patches.remove_patches()
    before = _replaced()
    rank_group_of()
    with_group = _replaced()
    torch_patches.remove_patches()
    after = _replaced()
    works = (
        torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.ones(1))], 1.0).item()
        == 0.0
    )
    return (
        before == after,
        not any(a is b for a, b in zip(before, with_group, strict=True)),
        works,
    )


def test_pytorch_is_changed_by_the_first_group_and_can_be_as_it_was() -> None:
    assert on_ranks(1, _before_with_and_without_a_group) == [(True, True, True)]


def test_importing_hetconv_changes_nothing_in_pytorch() -> None:
    code = """
import inspect, torch
def seen():
    apply = inspect.getattr_static(torch.autograd.Function, "apply")
    clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
    return apply, clip, torch.amp.GradScaler._unscale_grads_
before = seen()
import hetconv
hetconv.parallelize, hetconv.HetConv2d, hetconv.HetTensor
assert seen() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
