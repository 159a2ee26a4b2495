"""Channels-last images stay so on shards, through a whole training step: torch
is much slower otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hetconv
from hetconv.runtime.inputs import cropped
from hetconv.sharding.split import SplitKind
from tests.nets import plan_of, splits_of
from tests.spawn import on_ranks

BATCHES = 1, 2  # the strides of one image can be those of a tensor in either order


class Hourglass(nn.Module):
    """Down by pooling; up by interpolation and transposed convolutions, of which one
    must be cropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.cropped_up = (
            nn.ConvTranspose2d(16, 16, 2, 2),
            nn.ConvTranspose2d(16, 16, 4, 2, 1),
        )
        self.last = nn.Conv2d(64, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        z = torch.relu(self.inner(F.max_pool2d(y, 3, 2, 1)))
        ups = [
            self.up(z),
            self.cropped_up(z),
            F.interpolate(z, scale_factor=2, mode="bilinear"),
        ]
        out: Tensor = self.last(torch.cat([y, *ups], 1))
        return out


MATTERS = (
    "conv",
    "pool",
    "upsample",
    "batch_norm",
)  # where torch has another, slower, way for another order


class Lying(TorchDispatchMode):
    """Notes where these are given images in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.otherwise: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(name in str(func) for name in MATTERS):
            self.seen.add(str(func))
            for y in args:
                if (
                    isinstance(y, Tensor)
                    and y.dim() == 4
                    and not y.is_meta
                    and not in_order(y)
                ):
                    self.otherwise.append((str(func), tuple(y.shape), y.stride()))
        return func(*args, **(kwargs or {}))


def in_order(y: Tensor) -> bool:
    """Whether an image, or a filter, lies channels-last also by the strides of
    dimensions of one number.
    """
    n, c, h, w = y.stride()
    return n >= h >= w >= c == 1


def in_another_order(
    kind: SplitKind, ratio: tuple[int, ...], batch: int
) -> tuple[list[Any], int]:
    model = Hourglass().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plan = plan_of(model, splits_of(model, (kind,), ratio), len(ratio))
    cut = hetconv.parallelize(model, plan)
    x = torch.randn(batch, 8, 12, 14).contiguous(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch, Lying() as lying:
        # Without AVX-512 weight gradients are computed on contiguous copies.
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        y = cut(x)
        y.backward(torch.ones_like(y))
    return lying.otherwise, len(lying.seen)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("ratio", [(2, 1), (1, 0)])
@pytest.mark.parametrize("kind", ["height", "width", "filter", "channel"])
def test_a_training_step_stays_channels_last(
    kind: SplitKind, ratio: tuple[int, ...], batch: int
) -> None:
    otherwise, seen = zip(
        *on_ranks(len(ratio), in_another_order, kind, ratio, batch), strict=True
    )
    assert otherwise == ([],) * len(ratio)
    assert seen[0]


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_what_is_cropped_is_what_torch_narrows(batch: int, dim: int) -> None:
    x = (
        torch.randn(batch, 4, 6, 8)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    weight = torch.randn(batch, 4, 6, 8).narrow(dim, 0, 3)
    y = cropped(x, dim, (2, 5))
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    (expected,) = torch.autograd.grad((x.narrow(dim, 2, 3) * weight).sum(), x)
    assert torch.equal(y, x.narrow(dim, 2, 3))
    assert torch.equal(gradient, expected)
    assert cropped(x, dim, (0, x.shape[dim])) is x
