"""Between the ranks' agreement and the result, the host of a GPU waits for nothing.

A rank of two runs on meta tensors, which no host can read, and which say that they are
on CUDA; NCCL is replaced by nothing. Autograd runs on them without a GPU, as it does not
on fake CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv import kernels
from hetconv.comm import collectives, consensus, exchange
from hetconv.comm.rank_group import RankGroup
from hetconv.comm.watch.deadlock import DeadlockWatch
from hetconv.nn import model_call, parallelize
from hetconv.runtime.graph_capture import CaptureGuard, NotCapturableError
from hetconv.sharding.split import SplitKind
from tests.nets import NETS, plan_of, splits_of

META = torch.device("meta")
RATIO = (3, 2)


class Sent(NamedTuple):
    """In place of `dist.P2POp`, and of the work that it becomes."""

    op: Any
    tensor: Tensor
    group: Any = None
    group_peer: int = 0
    tag: int = 0

    def wait(self) -> None:
        """Nothing is sent."""


class Resized(nn.Module):
    """What computes numbers of its own on shards: uneven groups, pools and resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 10, 3, padding=1), nn.Conv2d(10, 6, 3, padding=1)
        self.group, self.instance = nn.GroupNorm(2, 10), nn.InstanceNorm2d(6)
        self.pool = nn.AvgPool2d(3, 2, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.group(self.a(x)))
        y = self.instance(self.b(self.pool(y)))
        y = F.interpolate(y, scale_factor=1.5, mode="bilinear")
        return F.avg_pool2d(F.interpolate(y, size=(13, 11), mode="nearest"), 3, 1, 1)


def without_host_numbers(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Refuses tensors of Python's numbers, whose copy to meta tensors no mode sees."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        assert x.device != META, "Python's numbers are copied to the device"
        return x

    return made


MODELS = NETS | {"resized": (Resized, (5, 3, 16, 14))}


def update_stats(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """As `torch.batch_norm_update_stats`, which meta tensors do not know."""
    mean = x.new_empty(x.shape[1])
    return mean, mean.clone()


def backward_reduce(
    g: Tensor, x: Tensor, mean: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `torch.batch_norm_backward_reduce`, which meta tensors do not know."""
    return mean.clone(), mean.clone(), mean.clone(), mean.clone()


def group_of_two(rank: int) -> RankGroup:
    watch = DeadlockWatch.__new__(DeadlockWatch)
    nobody: Any = None
    return RankGroup(nobody, nobody, rank, 2, "nccl", watch)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Meta tensors in place of CUDA's, and another rank that agrees and sends nothing."""
    patch = monkeypatch.setattr
    patch(Tensor, "is_cuda", property(lambda x: x.device.type == "meta"))
    patch(torch, "is_autocast_enabled", lambda kind=None: False)
    patch(consensus, "start_all_gather_small", lambda _, word: lambda: word[None])
    patch(parallelize, "broadcast", lambda *_: None)
    patch(parallelize, "_share_random_state", lambda *_: None)
    patch(model_call, "checksum", lambda _: 0)
    patch(model_call, "start_consensus", lambda *_: lambda: None)
    patch(exchange.dist, "P2POp", Sent)
    patch(exchange.dist, "batch_isend_irecv", list)
    for collective in ("_all_gather", "_reduce_scatter"):
        patch(collectives, collective, lambda y, x, **_: Sent(None, y))
    kernels.set_backend("aten")
    patch(torch, "batch_norm_update_stats", update_stats)
    patch(torch, "batch_norm_backward_reduce", backward_reduce)
    yield monkeypatch
    kernels.set_backend("auto")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("kind", ["height", "filter", "sample", "channel"])
@pytest.mark.parametrize("net", MODELS)
def test_a_step_can_be_captured(
    net: str,
    kind: SplitKind,
    mode: str,
    rank: int,
    stand_ins: pytest.MonkeyPatch,
) -> None:
    make, shape = MODELS[net]
    group, train = group_of_two(rank), mode == "train"
    stand_ins.setattr(parallelize, "rank_group_of", lambda _: group)
    plain = make().train(train).to(META)
    splits = splits_of(plain, (kind,), RATIO)
    model = hetconv.parallelize(plain, plan_of(plain, splits, 2), sync_every=0)
    x = torch.empty((5, *shape[1:]), device=META, requires_grad=train)

    def step() -> None:
        with torch.set_grad_enabled(train):
            y = model(x)
        if train:
            y.square().sum().backward()

    for _ in range(2):
        step()
    for owner, maker in (
        (torch, "tensor"),
        (torch, "as_tensor"),
        (Tensor, "new_tensor"),
    ):
        stand_ins.setattr(owner, maker, without_host_numbers(getattr(owner, maker)))
    with CaptureGuard(META):
        step()
    assert not train or x.grad is not None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (torch.ops.aten.lift_fresh.default, "Python's numbers"),
        (lambda x: x.cpu(), "copies between cpu and meta"),
        (lambda x: torch.ones(2).to(META), "copies between cpu and meta"),
        (lambda x: x.tolist(), "copies between cpu and meta"),
        (lambda x: float(x.sum()), "waits for its result"),
        (lambda x: x.nonzero(), "waits for the shape"),
        (lambda x: x[x > 0], "places in a mask"),
    ],
)
def test_a_hidden_synchronization_is_found(call: Any, reason: str) -> None:
    x = torch.empty(2, device=META)
    with CaptureGuard(META), pytest.raises(NotCapturableError, match=reason):
        call(x)
