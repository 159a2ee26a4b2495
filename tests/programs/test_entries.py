"""Whatever module or method of a parallelized model is called from outside gives what
one device gives.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetconv
from hetconv.containers import tensors_in
from hetconv.sharding.split import Split, SplitKind
from tests.equivalence import Differences, apart, assert_same, full_gradients
from tests.nets import plan_of
from tests.spawn import on_ranks

Pair = namedtuple("Pair", "mean spread")
SPLITS: dict[SplitKind, tuple[tuple[int, int], tuple[int, int]]] = {
    "height": ((2, 1), (2, 1)),
    "filter": ((4, 2), (2, 1)),
    "channel": ((2, 1), (4, 2)),
}


@dataclass(frozen=True)
class Latents:
    sample: Tensor
    parts: list[Tensor]


class Gaussian:
    """As diffusers has it: an object, not a container."""

    def __init__(self, parameters: Tensor):
        self.parameters = parameters
        self.mean, self.logvar = parameters.chunk(2, dim=1)
        self.extra = {"both": (self.mean, [self.logvar])}


class Root:
    """Refers to itself through what it holds, as a tree whose nodes know their parents does."""

    def __init__(self, tensor: Tensor):
        self.leaf = Leaf(self, tensor)


class Leaf:
    def __init__(self, parent: Root, tensor: Tensor):
        self.parent, self.tensor = parent, tensor


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ahead = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.back = nn.Conv2d(6, 3, 3, padding=1)
        self.kept: list[Tensor] = []

    def encode(self, x: Tensor) -> Gaussian:
        return Gaussian(self.ahead(x))

    def decode(self, z: Tensor) -> Latents:
        y = self.back(z)
        return Latents(y, [y * 2, y + 1])

    def forward(self, x: Tensor, how: str = "object") -> Any:
        y = self.ahead(x)
        if how == "generator":
            return (t for t in [y])
        if how == "closure":
            return lambda: y
        return {
            "object": lambda: Gaussian(y),
            "dataclass": lambda: Latents(y, [y]),
            "named": lambda: Pair(y, [y]),
            "nested": lambda: {"a": [(y, {"b": Latents(y, [y])})], "n": 3},
            "set": lambda: ({y}, frozenset([y])),
            "cycle": lambda: Root(y),
        }[how]()


def by_method(model: nn.Module, x: Tensor) -> Any:
    return model.decode(model.encode(x).parameters)


def by_module(model: nn.Module, x: Tensor) -> Any:
    return model.ahead(x), model.ahead[0](x), model.back(model.ahead(x))


def by_forward(model: nn.Module, x: Tensor) -> Any:
    return model.ahead.forward(x)


def in_a_checkpoint(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model.ahead, x, use_reentrant=False)


def twice_then_one_backward(model: nn.Module, x: Tensor) -> Any:
    return model.ahead(x), model.ahead(x.flip(0))


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    f.__name__: f
    for f in (
        by_method,
        by_module,
        by_forward,
        in_a_checkpoint,
        twice_then_one_backward,
    )
} | {
    how: lambda model, x, how=how: model(x, how)
    for how in ("object", "dataclass", "named", "nested", "set", "cycle")
}


def pair_of(kind: SplitKind) -> tuple[nn.Module, nn.Module]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    serial, (first, second) = Coder(), SPLITS[kind]
    splits = {"ahead.0": Split(kind, first), "back": Split(kind, second)}
    return serial, hetconv.parallelize(
        copy.deepcopy(serial), plan_of(serial, splits, 2)
    )


def called(name: str, kind: SplitKind) -> Differences:
    serial, cut = pair_of(kind)
    x = torch.randn(2, 3, 7, 5)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    results, expected = (
        tensors_in(CALLS[name](cut, mine)),
        tensors_in(CALLS[name](serial, theirs)),
    )
    assert all(
        type(y) is Tensor for y in results
    )  # also where an object is reached a second time
    for of_one in (results, expected):
        sum((y * (i + 1)).square().sum() for i, y in enumerate(of_one)).backward()
    found = {
        f"result {i}": apart(a, b)
        for i, (a, b) in enumerate(zip(results, expected, strict=True))
    }
    found["input"] = apart(mine.grad, theirs.grad)
    gradients = full_gradients(cut)
    return found | {
        n: apart(gradients[n], p.grad) for n, p in serial.named_parameters()
    }


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_outside(name: str, kind: SplitKind) -> None:
    assert_same(on_ranks(2, called, name, kind))


def refused(how: str) -> str:
    _, cut = pair_of("filter")
    x = torch.randn(2, 3, 7, 5)
    calls: dict[str, Callable[[], Any]] = {
        "generator": lambda: cut(x, "generator"),
        "closure": lambda: cut(x, "closure"),
        "pickle": lambda: pickle.dumps(cut),
        "trace": lambda: torch.jit.trace(cut.ahead, x),
        "export": lambda: torch.export.export(cut.ahead, (x,)),
    }
    with pytest.raises(hetconv.HetConvError) as e:
        calls[how]()
    cut(x)  # nothing is lost
    return str(e.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("generator", "a generator was found"),
        ("closure", "a function was found"),
        ("pickle", "cannot be pickled.*full_state_dict"),
        ("trace", "cannot be traced or exported"),
        ("export", "cannot be traced or exported"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_right_is_refused_by_name(how: str, said: str) -> None:
    assert all(re.search(said, message) for message in on_ranks(2, refused, how))


def copied() -> Differences:
    """A copy is a model of its own, such as an average of the weights."""
    serial, cut = pair_of("filter")
    teacher, average = copy.deepcopy(serial), copy.deepcopy(cut)
    with torch.no_grad():
        for model, ema in ((serial, teacher), (cut, average)):
            for p, q in zip(model.parameters(), ema.parameters(), strict=True):
                q.lerp_(p + 1, 0.25)
    x = torch.randn(2, 3, 7, 5)
    with torch.no_grad():
        return {
            "output": apart(average.ahead(x), teacher.ahead(x)),
            "model": apart(cut.ahead(x), serial.ahead(x)),
        }


def test_a_copy_of_a_parallelized_model() -> None:
    assert_same(on_ranks(2, copied))


def different_modules() -> str:
    _, cut = pair_of("filter")
    x = torch.randn(2, 3, 7, 5)
    name = "ahead" if torch.distributed.get_rank() else "back"
    with pytest.raises(hetconv.DisagreementError) as e:
        getattr(cut, name)(x if name == "ahead" else torch.randn(2, 6, 7, 5))
    return str(e.value)


def test_ranks_that_call_different_modules_are_told_which() -> None:
    for message in on_ranks(2, different_modules):
        assert "rank 0: forward of back" in message
        assert "rank 1: forward of ahead" in message
