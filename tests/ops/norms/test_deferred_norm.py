"""Norms that wait for the convolution that reads them: the results of one device in every
program, and one round of messages where there were two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetconv
from hetconv.sharding.split import SplitKind
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    leaves,
    one_step,
    pair,
    relative,
)
from tests.nets import splits_of
from tests.spawn import on_ranks

SPATIAL: tuple[SplitKind, ...] = ("height", "width")
RATIOS = [(3, 1), (5, 2, 1), (1, 0, 2)]
SHAPE = (2, 4, 16, 10)


class Chain(nn.Module):
    """Norm, function, convolution, with the residual of U-Nets and decoders."""

    function: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        given: dict[str, Any] = {"kernel_size": 3, "padding": 1} | options
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, **given)
        self.norm2 = nn.GroupNorm(4, 8, affine=False)
        self.third = nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        y = self.second(self.function(self.norm(self.first(x))))
        return self.third(self.function(self.norm2(y)))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu in place": torch.relu_,
    "silu in place": lambda x: F.silu(x, inplace=True),
    "leaky relu": lambda x: F.leaky_relu(x, 0.2, True),
    "leaky relu by name": lambda x: F.leaky_relu(x, negative_slope=0.3),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "hardswish": F.hardswish,
    "two": lambda x: torch.tanh(F.relu(x)),
    "a method": lambda x: x.relu(),
    "a dropout of nothing": lambda x: F.dropout(F.mish(x), 0.0),
    "not zero at zero": torch.sigmoid,
    "none": lambda x: x,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "strided": {"stride": 2},
    "wide": {"kernel_size": 5, "padding": 2},
    "dilated": {"dilation": 2, "padding": 2},
    "without padding": {"padding": 0},
    "of two taps": {"kernel_size": 2, "stride": 2, "padding": 0},
    "of one tap": {"kernel_size": 1, "padding": 0},
    "depthwise": {"groups": 8},
    "without a bias": {"bias": False},
}


def scaled(a: Tensor | None, b: Tensor | None) -> float:
    """The largest difference, over the largest value where that is above one."""
    most = float(b.detach().abs().max()) if b is not None else 1.0
    return apart(a, b) / max(most, 1.0)


def stepped(
    make: Callable[[], nn.Module], kind: SplitKind, ratio: tuple[int, ...]
) -> Differences:
    """Two steps, of which the second runs what the first has cached; then in evaluation."""
    serial, cut = pair(make, splits_of(make(), (kind,), ratio), len(ratio))
    found: Differences = {}
    for step in range(2):
        of_step = one_step(serial, cut, torch.randn(SHAPE), by=scaled)
        found |= {f"{step}: {name}": value for name, value in of_step.items()}
    x = torch.randn(SHAPE)
    for how in (torch.no_grad, torch.inference_mode):
        with how():
            given = zip(leaves(cut(x)), leaves(serial(x)), strict=True)
            found |= {
                f"{how.__name__} {i}": scaled(*two) for i, two in enumerate(given)
            }
    return found


def with_function(name: str, kind: SplitKind, ratio: tuple[int, ...]) -> Differences:
    def make() -> nn.Module:
        chain = Chain()
        chain.function = FUNCTIONS[name]  # type: ignore[method-assign]
        return chain

    return stepped(make, kind, ratio)


@pytest.mark.parametrize("ratio", RATIOS[:2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, ratio: tuple[int, ...]) -> None:
    assert_same(on_ranks(len(ratio), with_function, name, "height", ratio))


def with_geometry(name: str, kind: SplitKind, ratio: tuple[int, ...]) -> Differences:
    def make() -> nn.Module:
        return Chain(**GEOMETRIES[name])

    return stepped(make, kind, ratio)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kind", SPATIAL)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name: str, kind: SplitKind, ratio: tuple[int, ...]) -> None:
    assert_same(on_ranks(len(ratio), with_geometry, name, kind, ratio))


class Sequences(nn.Module):
    """Of one dimension or three, with instance norms and learned slopes."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
        self.body = nn.Sequential(
            conv(3, 4, 3, padding=1),
            norm(4, affine=True),
            nn.Dropout(0.0),
            nn.PReLU(),
            conv(4, 6, 3, padding=1),
            nn.GroupNorm(1, 6),
            nn.PReLU(6),
            conv(6, 4, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def in_dims(dims: int, ratio: tuple[int, ...], last: bool) -> Differences:
    def make() -> nn.Module:
        return Sequences(dims)

    kinds: tuple[SplitKind, ...] = ("width", "height", "depth")
    serial, cut = pair(make, splits_of(make(), (kinds[dims - 1],), ratio), len(ratio))
    x = torch.randn(2, 3, *(9, 6, 5)[:dims])
    if last and dims > 1:
        memory = torch.channels_last if dims == 2 else torch.channels_last_3d
        x, cut = x.contiguous(memory_format=memory), cut.to(memory_format=memory)
    return one_step(serial, cut, x, by=scaled)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dimensions_and_memory_formats(dims: int, last: bool) -> None:
    assert_same(on_ranks(2, in_dims, dims, (2, 1), last))


class Program(Chain):
    """What programs do with the result of a norm besides handing it on."""

    def __init__(self, turn: str) -> None:
        super().__init__()
        self.turn = turn
        self.slope = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return getattr(self, self.turn)(x)

    def read_before_and_after(self, x: Tensor) -> Any:
        y = self.norm(x)
        a = F.silu(y)
        z = self.second(a)
        return z + y, a * 2, y.mean()

    def two_convolutions(self, x: Tensor) -> Any:
        a = F.relu(self.norm(x))
        return self.second(a) + F.conv2d(a, self.second.weight, padding=1), self.third(
            a
        )

    def input_written_before(self, x: Tensor) -> Any:
        y = self.norm(x)
        if not torch.is_grad_enabled():  # PyTorch refuses it in training
            x = x.mul_(2)
        return self.second(F.relu(y)), x

    def input_written_after(self, x: Tensor) -> Any:
        y = self.norm(x)
        a = F.relu(y)
        z = self.second(a)
        z += 1
        return z, y, a

    def written_itself(self, x: Tensor) -> Any:
        y = self.norm(x)
        y += 1
        a = F.silu(y, inplace=True)
        return self.second(a), a

    def not_used(self, x: Tensor) -> Any:
        F.relu(self.norm(x))
        return self.second(x)

    def returned(self, x: Tensor) -> Any:
        return F.silu(self.norm(x)), self.norm2(x)

    def gathered(self, x: Tensor) -> Any:
        return hetconv.gather(F.silu(self.norm(x))) * 2

    def slopes(self, x: Tensor) -> Any:
        return self.second(F.prelu(self.norm(x), self.slope)), F.prelu(
            self.norm2(x), weight=self.slope
        )

    def without_gradients(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = F.relu(self.norm(x))
        return self.second(y)

    def convolved_without_gradients(self, x: Tensor) -> Any:
        y = self.norm(x)
        with torch.no_grad():
            z = self.second(F.relu(y))
        return z + self.second(y)

    def computed_again(self, x: Tensor) -> Any:
        y = F.silu(self.norm(x))
        return checkpoint(self.second, y, use_reentrant=False)

    def all_computed_again(self, x: Tensor) -> Any:
        def region(x: Tensor) -> Tensor:
            found: Tensor = self.second(F.silu(self.norm(x)))
            return found

        y = checkpoint(region, x, use_reentrant=False)
        return self.third(F.relu(self.norm2(y)))

    def norm_computed_again(self, x: Tensor) -> Any:
        y = checkpoint(self.norm, x, use_reentrant=False)
        return self.second(F.relu(y))

    def twice_the_same(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.second(F.relu(y)) + self.second(F.silu(y))


PROGRAMS = [
    name
    for name, value in vars(Program).items()
    if callable(value) and not name.startswith("_") and name != "forward"
]


def ran(turn: str, ratio: tuple[int, ...]) -> Differences:
    def make() -> nn.Module:
        return Program(turn)

    return stepped(make, "height", ratio)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("turn", PROGRAMS)
def test_programs(turn: str, ratio: tuple[int, ...]) -> None:
    assert_same(on_ranks(len(ratio), ran, turn, ratio))


def penalized(ratio: tuple[int, ...]) -> Differences:
    serial, cut = pair(Chain, splits_of(Chain(), ("height",), ratio), len(ratio))
    x = torch.randn(SHAPE)
    found = []
    for model in (serial, cut):
        own = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(own).square().sum(), own, create_graph=True)
        g.square().sum().backward()
        grads = (
            full_gradients(model)
            if model is cut
            else {k: p.grad for k, p in model.named_parameters()}
        )
        found.append({"x": own.grad, **grads})
    return {k: scaled(found[1][k], g) for k, g in found[0].items()}


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradients_of_gradients(ratio: tuple[int, ...]) -> None:
    assert_same(on_ranks(len(ratio), penalized, ratio))


def in_half(dtype: torch.dtype) -> Differences:
    splits = splits_of(Chain(), ("height",), (2, 1))
    serial, cut = pair(Chain, splits, 2, dtype=dtype)
    exact = copy.deepcopy(serial).double()
    x = torch.randn(SHAPE, dtype=dtype)
    for model in (exact, cut):
        own = x.to(next(model.parameters()).dtype)
        model(own).double().square().mean().backward()
    expected = {k: p.grad for k, p in exact.named_parameters()}
    found = full_gradients(cut)
    assert all(found[k].dtype == dtype for k in expected)  # type: ignore[union-attr]
    return {k: relative(found[k], g) for k, g in expected.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(dtype: torch.dtype) -> None:
    limit = {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for differences in on_ranks(2, in_half, dtype):
        assert max(differences.values()) < limit, differences
