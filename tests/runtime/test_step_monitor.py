"""Seconds that a rank computes and waits: what sleeps stand for is found again."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.nn.split_layer import SplitLayer
from hetconv.runtime.step_monitor import RankTimes, StepMonitor
from hetconv.sharding.split import Split
from tests.nets import plan_of
from tests.spawn import on_ranks

SLEEP_S = 0.2


class _Sleep(torch.autograd.Function):
    """Rank 0 sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S if dist.get_rank() == 0 else 0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        time.sleep(SLEEP_S if dist.get_rank() == 0 else 0)
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Sleep.apply(self.a(x)))  # type: ignore[no-any-return]


def measured(training: bool) -> RankTimes:
    splits = {"a": Split("filter", (2, 2)), "b": Split("filter", (2, 2))}
    net = Net()
    model = hetconv.parallelize(net, plan_of(net, splits, 2))
    layer = next(m for m in model.modules() if isinstance(m, SplitLayer))
    layer.context.monitor = monitor = StepMonitor()
    x = torch.rand(1, 4, 8, 8)
    with torch.set_grad_enabled(training):
        y = model(x)
        if training:
            y.sum().backward()
    times = monitor.take()
    assert monitor.take() == RankTimes(0.0, 0.0)
    return times


def test_a_rank_that_sleeps_is_busy_and_the_other_one_waits() -> None:
    for training in (False, True):
        passes = 1 + training
        slow, fast = on_ranks(2, measured, training)
        assert slow.busy_s >= passes * SLEEP_S
        assert fast.waited_s > 0
