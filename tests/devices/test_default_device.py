"""A program that sets PyTorch's default device: what hetconv makes for itself does not
depend on it.
"""

from __future__ import annotations

import ast
import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hetconv
from hetconv.nn.replica_sync import sync_replicated
from hetconv.sharding.split import SplitKind
from tests import ROOT
from tests.equivalence import Differences, apart, assert_same, full_gradients
from tests.nets import plan_of, splits_of
from tests.programs.table import Net
from tests.spawn import on_ranks

FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}
"""Functions of PyTorch that make a tensor on the default device unless they are told
another one.
"""
FOR_USERS = {"autotune/models/inputs.py", "autotune/models/build.py"}
"""Inputs of the user's model are made as the user's program makes its own."""


def calls_without_a_device(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_torch = (
                isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            )
            given = {keyword.arg for keyword in node.keywords}
            if (
                of_torch
                and node.func.attr in FACTORIES
                and not given & {"device", None}
            ):
                yield node.lineno


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    files = [
        path
        for folder in ("hetconv", "kernels", "autotune")
        for path in (ROOT / folder).rglob("*.py")
    ]
    names = {
        str(path.relative_to(ROOT).as_posix()): path
        for path in files
        if "hetconv/autotune" not in str(path)
    }
    found = [
        f"{name}:{line}"
        for name, path in names.items()
        for line in calls_without_a_device(path)
    ]
    assert [place for place in found if place.partition(":")[0] not in FOR_USERS] == []


def on_another_default_device(kind: SplitKind) -> Differences:
    """A step whose backward pass runs in a thread of its own, as on a GPU; the default
    device has no memory.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(3, 3, 9, 7)
    cut = hetconv.parallelize(
        copy.deepcopy(plain), plan_of(plain, splits_of(plain, (kind,), (2, 1)), 2)
    )
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        result = cut(x)
        backward = threading.Thread(target=result.square().mean().backward)
        backward.start()
        backward.join()
        found = {f"gradient {k}": g for k, g in full_gradients(cut).items()}
        assert sync_replicated(cut) == 0
        state = hetconv.full_state_dict(cut)
    finally:
        torch.set_default_device(before)
    expected = plain(x)
    expected.square().mean().backward()
    truth = {f"gradient {k}": p.grad for k, p in plain.named_parameters()} | {
        "result": expected
    }
    truth |= {f"state {k}": v for k, v in plain.state_dict().items()}
    found |= {"result": result} | {f"state {k}": v for k, v in state.items()}
    return {name: apart(value, truth[name]) for name, value in found.items()}


@pytest.mark.parametrize("kind", ["height", "filter", "channel", "sample"])
def test_a_step_under_another_default_device(kind: SplitKind) -> None:
    assert_same(on_ranks(2, on_another_default_device, kind))
