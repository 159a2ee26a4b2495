"""What fuse=True does not fuse, and what it refuses: the results are those without it,
or an error says why.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.tracing.fusion import fusible_functions
from tests.equivalence import Differences, apart, assert_same, one_step
from tests.nets import NETS, plan_of, splits_of
from tests.spawn import on_ranks

from .test_epilogue_fusion import Activated, counting, fused, ready


class Rewritten(nn.Module):
    """Reads a result again after it became part of another one, and after its input was
    written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.captured = (
            nn.Conv2d(4, 4, 1),
            nn.Conv2d(4, 4, 1),
            True,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.conv(x)
        z = F.relu(y)
        if self.captured:
            return z
        x.mul_(2)
        return z + y


class PlainInput(nn.Module):
    """The same with a plain tensor, whose writing nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.captured = nn.Conv2d(4, 4, 1), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if not self.captured:
            x.mul_(2)
        return F.relu(y)


def refused(make: type[Rewritten] | type[PlainInput]) -> str:
    serial = ready(make)
    cut = fused(serial, ("filter",), (3, 1), (1, 4, 5, 5))
    cut.captured = False  # type: ignore[assignment]
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(hetconv.HetConvError) as error:
        cut(x)
    cut.captured = True  # type: ignore[assignment]
    with torch.no_grad():  # and the next call is fine
        assert apart(cut(x), serial(x)) <= 1e-12
    return str(error.value)


@pytest.mark.parametrize("make", [Rewritten, PlainInput])
def test_what_cannot_be_computed_any_more_is_refused(
    make: type[Rewritten] | type[PlainInput],
) -> None:
    for message in on_ranks(2, refused, make):
        assert "fuse=True" in message


def trained() -> Differences:
    make, shape = NETS["resnet"]
    serial = ready(make).train()
    cut = fused(serial.eval(), ("height", "filter"), (2, 1), shape)
    serial.train(), cut.train()
    return one_step(serial, cut, torch.randn(shape, dtype=torch.float64))


def test_training_is_as_without() -> None:
    assert_same(on_ranks(2, trained))


def not_folded() -> dict[str, int]:
    serial, shape = ready(lambda: Activated("relu")), (2, 4, 9, 7)
    with torch.no_grad():
        following = fusible_functions(
            hetconv.capture(serial, torch.zeros(shape, dtype=torch.float64))
        )
    plan = plan_of(serial, splits_of(serial, ("height",), (2, 1)), 2, following)
    cut = hetconv.parallelize(copy.deepcopy(serial), plan, fuse=True)
    x = torch.ones(shape, dtype=torch.float64)
    with torch.no_grad(), counting(lambda: cut(x)) as counts:
        assert apart(cut(x), serial(x)) <= 1e-12
    return counts


def test_on_cpus_it_is_left_out() -> None:
    for counts in on_ranks(2, not_folded):
        assert counts["finished"] == 0


class Tuned(nn.Module):
    """A convolution without autograd, under a norm that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.graded = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            False,
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.conv(x)
        with torch.set_grad_enabled(self.graded):
            y: Tensor = self.bn(x)
            return y


def tuned() -> Differences:
    serial, shape = ready(Tuned), (2, 4, 9, 7)
    cut = fused(serial, ("height",), (2, 1), shape)
    serial.graded = cut.graded = True  # type: ignore[assignment]
    return one_step(serial, cut, torch.randn(shape, dtype=torch.float64))


def test_what_autograd_is_to_know_of_is_not_folded() -> None:
    assert_same(on_ranks(2, tuned))
