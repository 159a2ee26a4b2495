"""parallelize(..., fuse=True): what follows a convolution is computed with it, and
nothing comes out differently.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv import kernels
from hetconv.sharding.split import SplitKind
from hetconv.tracing.fusion import fusible_functions
from tests import interpreter  # noqa: F401 (before ranks are forked, it mends how bfloat16 is multiplied)
from tests.equivalence import Differences, apart, assert_same, leaves, relative
from tests.nets import IMAGE_KINDS, NETS, Block, plan_of, splits_of
from tests.spawn import on_ranks

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "leaky relu": lambda: nn.LeakyReLU(0.3),
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU(approximate="tanh"),
}


class Activated(nn.Module):
    """conv, norm, residual, activation; without affine parameters the second time."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.again, self.bn2 = (
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8, affine=False),
        )
        self.first, self.second = ACTIVATIONS[activation](), ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.bn(self.conv(x)))
        return self.second(y + self.bn2(self.again(y)))


class Bent(nn.Module):
    """Captured one way (``turn`` 0), then run in others that the capture did not see."""

    def __init__(self, turn: int = 0) -> None:
        super().__init__()
        self.first, self.conv, self.bn = (
            nn.Conv2d(4, 8, 1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.turn, self.kept = turn, torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        y = self.conv(x)
        match self.turn:
            case 1:  # read twice
                return F.relu(self.bn(y)) + y
            case 2:  # what it reads is written to meanwhile
                x.mul_(2)
                return F.relu(self.bn(y)) + x
            case 3:  # another function
                return torch.tanh(y) + self.bn.weight.view(-1, 1, 1)
            case 4:  # another order
                return self.bn(F.relu(y))
            case 5:  # nothing follows, and something is not used
                self.bn(self.conv(x))
                return y, x
            case 6:  # looked at in between
                z = self.bn(y)
                assert z.is_contiguous() in (True, False)
                return F.relu(z, inplace=True), z
            case 7:  # in training after all
                return F.relu(F.batch_norm(y, None, None, training=True))
            case 8:  # an addition that is none of a residual's
                return F.relu(torch.add(self.bn(y), x, alpha=2)), self.bn(
                    self.conv(x)
                ) + 1
            case 9:  # of another shape, and of itself
                z = self.bn(self.conv(x))
                return self.bn(y) + x[:, :, :1], z + z
            case 10:  # the other one is written to in place
                x += self.bn(y)
                return F.relu(x)
        return F.relu(self.bn(y) + x)


def ready(
    make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64
) -> nn.Module:
    """In evaluation, with running statistics and affine parameters that no norm starts with."""
    torch.manual_seed(0)
    model = make().eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for t in (layer.weight, layer.running_var):
                if t is not None:
                    nn.init.uniform_(t, 0.5, 2)
            for t in (layer.bias, layer.running_mean):
                if t is not None:
                    nn.init.normal_(t)
    return model.to(dtype)


def fused(
    model: nn.Module,
    kinds: tuple[SplitKind, ...],
    ratio: tuple[int, ...],
    shape: tuple[int, ...],
    whole: bool = False,
) -> nn.Module:
    x = torch.zeros(shape, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        following = fusible_functions(hetconv.capture(model, x))
    cut = copy.deepcopy(model)
    with patch("hetconv.nn.parallelize.fusion_pays", return_value=True):
        plan = plan_of(cut, splits_of(cut, kinds, ratio, whole), len(ratio), following)
        return hetconv.parallelize(cut, plan, fuse=True)


@contextmanager
def counting(first: Callable[[], object]) -> Iterator[dict[str, int]]:
    """Calls of torch's batch norm, convolutions, and those of them that finish what they store.

    ``first`` runs before the count starts: the first call of a function is tried on
    whole tensors as well.
    """
    counts = {"norms": 0, "convolutions": 0, "finished": 0}
    norm, conv = F.batch_norm, kernels.conv_forward

    def counted(*args: Any, **options: Any) -> Tensor:
        counts["convolutions"] += 1
        epilogue = options["epilogue"]
        counts["finished"] += epilogue.scale is not None or bool(epilogue.activation)
        return conv(*args, **options)

    @functools.wraps(norm)
    def normed(*args: Any, **options: Any) -> Tensor:
        counts["norms"] += type(args[0]) is Tensor  # on a part
        return norm(*args, **options)

    F.batch_norm, kernels.conv_forward = normed, counted  # type: ignore[assignment]
    try:
        first()
        counts.update(dict.fromkeys(counts, 0))
        yield counts
    finally:
        F.batch_norm, kernels.conv_forward = norm, conv


def evaluated(
    net: str, kinds: tuple[SplitKind, ...], ratio: tuple[int, ...], whole: bool = False
) -> Differences:
    make, shape = NETS[net]
    serial = ready(make)
    cut = fused(serial, kinds, ratio, shape, whole)
    found: Differences = {}
    for how in (torch.no_grad, torch.inference_mode):
        x = torch.randn(shape, dtype=torch.float64)
        with how():
            found |= {
                f"{how.__name__} {i}": apart(a, b)
                for i, (a, b) in enumerate(
                    zip(leaves(cut(x)), leaves(serial(x)), strict=True)
                )
            }
    return found


@pytest.mark.parametrize("ratio", [(3, 1), (5, 2, 1), (1, 0, 2)])
@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("net", NETS)
def test_models_compute_what_they_do_on_one_device(
    net: str, kind: SplitKind, ratio: tuple[int, ...]
) -> None:
    assert_same(on_ranks(len(ratio), evaluated, net, (kind,), ratio))


@pytest.mark.parametrize("net", NETS)
def test_with_a_mix_of_splits(net: str) -> None:
    assert_same(
        on_ranks(
            3,
            evaluated,
            net,
            ("height", "filter", "width", "sample", "channel"),
            (2, 3, 1),
        )
    )


def activated(
    name: str,
    kind: SplitKind,
    dtype: torch.dtype,
    backend: kernels.backend_choice.Backend,
) -> dict[str, float]:
    serial, shape = ready(lambda: Activated(name), dtype), (2, 4, 9, 7)
    cut = fused(serial, (kind,), (2, 1), shape)
    plain = hetconv.parallelize(
        copy.deepcopy(serial), plan_of(serial, splits_of(serial, (kind,), (2, 1)), 2)
    )
    x = torch.randn(shape, dtype=torch.float64)
    truth = copy.deepcopy(serial).double()
    kernels.set_backend(backend)
    try:
        with torch.no_grad():
            expected = truth(x)
            with counting(lambda: cut(x.to(dtype))) as counts:
                found = relative(cut(x.to(dtype)), expected)
            return {
                "fused": found,
                "unfused": relative(plain(x.to(dtype)), expected),
                **counts,
            }
    finally:
        kernels.set_backend("auto")


@pytest.mark.parametrize("kind", ["filter", "height", "sample"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_norm_residual_and_activation_are_folded(name: str, kind: SplitKind) -> None:
    for found in on_ranks(2, activated, name, kind, torch.float64, "auto"):
        assert found["fused"] <= 1e-14
        assert found["norms"] == 0
        assert found["finished"] >= 2


@pytest.mark.parametrize("kind", ["filter", "height"])
@pytest.mark.parametrize("backend", ["aten", "triton"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:]
)
def test_it_rounds_no_worse(dtype: torch.dtype, backend: str, kind: SplitKind) -> None:
    for found in on_ranks(2, activated, "silu", kind, dtype, backend):
        assert (
            0 < found["fused"] <= 3 * found["unfused"]
        )  # Triton's interpreter truncates to bfloat16
        assert found["norms"] == 0


def block(kind: SplitKind) -> dict[str, int]:
    serial = ready(lambda: Block(6, 8))
    cut = fused(serial, (kind,), (3, 1), (4, 6, 12, 10))
    x = torch.randn(4, 6, 12, 10, dtype=torch.float64)
    with torch.no_grad(), counting(lambda: cut(x)) as counts:
        cut(x)
    return counts


@pytest.mark.parametrize("kind", ["filter", "sample"])
def test_every_convolution_is_computed_once_and_finished(kind: SplitKind) -> None:
    assert (
        on_ranks(2, block, kind) == [{"norms": 0, "convolutions": 3, "finished": 3}] * 2
    )


def bent(turn: int, kind: SplitKind) -> Differences:
    serial, shape = ready(Bent), (2, 4, 9, 7)
    cut = fused(serial, (kind,), (3, 1), shape)
    serial.turn = cut.turn = turn  # type: ignore[assignment]
    found: Differences = {}
    for how in (torch.no_grad, torch.inference_mode):
        x = torch.randn(shape, dtype=torch.float64)
        with how():
            pairs = zip(leaves(cut(x)), leaves(serial(x)), strict=True)
            found |= {
                f"{how.__name__} {i}": apart(a, b) for i, (a, b) in enumerate(pairs)
            }
    return found


@pytest.mark.parametrize("kind", ["filter", "height", "channel"])
@pytest.mark.parametrize("turn", range(11))
def test_a_run_that_was_not_captured_is_right_too(turn: int, kind: SplitKind) -> None:
    assert_same(on_ranks(2, bent, turn, kind))
