"""Gradients of replicas are summed in buckets while backward goes on, and whoever reads
them sees whole ones.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.comm.rank_group import count_sent, rank_group_of
from hetconv.runtime import gradient_sync, throttle
from hetconv.runtime.gradient_sync import synced_grad
from hetconv.sharding.moves import all_reduce, buckets, bytes_per_pair
from hetconv.sharding.split import SplitKind
from tests.equivalence import (
    Differences,
    apart,
    assert_same,
    full_gradients,
    loss_of,
    one_step,
    pair,
)
from tests.nets import NETS, plan_of, splits_of
from tests.spawn import on_ranks


@contextmanager
def small_buckets(numbers: int = 1) -> Iterator[None]:
    """As large as a parameter, or as so many numbers."""
    gradient_sync.buckets = partial(buckets, limit=numbers)  # type: ignore[assignment]
    try:
        yield
    finally:
        gradient_sync.buckets = buckets


@contextmanager
def noted(seen: list[str]) -> Iterator[None]:
    """What happens, in order: buckets that start and end, and convolutions, one after
    another noted once.
    """
    kept = gradient_sync._Bucket.start, gradient_sync._Bucket.end

    def noting(what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append(what)
            return fn(*args)

        return run

    gradient_sync._Bucket.start = noting("start", kept[0])  # type: ignore[method-assign]
    gradient_sync._Bucket.end = noting("end", kept[1])  # type: ignore[method-assign]
    try:
        with throttle.listen_to_computations(
            lambda _: seen.extend(["conv"] if seen[-1:] != ["conv"] else [])
        ):
            yield
    finally:
        gradient_sync._Bucket.start, gradient_sync._Bucket.end = kept  # type: ignore[method-assign]


def order_in_backward(kind: str, numbers: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))
    )
    cut = hetconv.parallelize(
        model, plan_of(model, splits_of(model, (kind,), (2, 0, 1)), 3)
    )  # type: ignore[arg-type]
    seen: list[str] = []
    with small_buckets(numbers), noted(seen):
        loss = cut(torch.randn(3, 4, 6, 6)).square().mean()
        seen.clear()
        loss.backward()
    return seen


@pytest.mark.parametrize("kind", ["sample", "height", "width"])
def test_a_bucket_is_sent_as_soon_as_it_is_full_and_waited_for_last(kind: str) -> None:
    own, all_at_once = ["conv", "start"] * 3 + ["end"] * 3, ["conv", "start", "end"]
    for numbers, busy in ((1, own), (10**6, all_at_once)):
        idle = [
            what for what in busy if what != "conv"
        ]  # rank 1 has nothing to compute, but sums too
        assert on_ranks(3, order_in_backward, kind, numbers) == [busy, idle, busy]


def in_small_buckets(net: str, numbers: int) -> Differences:
    make, shape = NETS[net]
    with small_buckets(numbers):
        return one_step(
            *pair(make, splits_of(make(), ("height", "sample"), (3, 1, 2)), 3),
            torch.randn(shape),
        )


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("numbers", [1, 200])
def test_many_buckets_under_way_at_once(net: str, numbers: int) -> None:
    assert_same(on_ranks(3, in_small_buckets, net, numbers))


class Branches(nn.Module):
    """Two results, a convolution that is called twice, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)
        )
        self.scale, self.unused = (
            nn.Parameter(torch.full((4, 1, 1), 0.5)),
            nn.Parameter(torch.ones(3)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.one(F.relu(self.one(x))) * self.scale
        return self.two(y), self.three(y)


def branches() -> tuple[nn.Module, nn.Module, Tensor]:
    serial, cut = pair(Branches, splits_of(Branches(), ("height",), (2, 0, 1)), 3)
    return serial, cut, torch.randn(2, 4, 6, 6)


def compared(serial: nn.Module, cut: nn.Module) -> Differences:
    gradients = full_gradients(cut)
    return {k: apart(gradients[k], p.grad) for k, p in serial.named_parameters()}


def backward_in_parts(numbers: int) -> Differences:
    """Each branch by itself through one graph, then both at once through the same."""
    serial, cut, x = branches()
    found: Differences = {}
    with small_buckets(numbers):
        for model in (serial, cut):
            first, second = model(x)
            loss_of(first).backward(retain_graph=True)
            loss_of(second).backward(retain_graph=True)
            (loss_of(first) * 2 + loss_of(second)).backward()
        found |= compared(serial, cut)
    return found


def two_graphs_at_once(numbers: int) -> Differences:
    """Forwards of two batches, then their backwards, the first one's last."""
    serial, cut, x = branches()
    with small_buckets(numbers):
        for model in (serial, cut):
            losses = [loss_of(model(batch)) for batch in (x, -x)]
            for loss in reversed(losses):
                loss.backward()
    return compared(serial, cut)


def gradients_by_name(numbers: int) -> Differences:
    """What `torch.autograd.grad` and hooks are given: all of what this rank holds, be
    it nothing.
    """
    serial, cut, x = branches()
    box = cut.one.held["bias"].boxes[dist.get_rank()]
    found: Differences = {}
    seen: list[list[Tensor]] = [[], []]
    with small_buckets(numbers):
        both = []
        for model, own in zip((serial, cut), seen, strict=True):
            model.one.weight.register_hook(own.append)
            model.one.weight.register_post_accumulate_grad_hook(
                lambda p, own=own: own.append(p.grad)
            )
            loss = loss_of(model(x)[0])
            both.append(
                torch.autograd.grad(
                    loss, [model.scale, model.one.bias], retain_graph=True
                )
            )
            loss.backward()
    (scale, bias), (its_scale, its_bias) = both
    found |= {
        "grad scale": apart(its_scale, scale),
        "grad bias": apart(its_bias, bias[: box.numel]),
    }
    found |= {
        f"hook {i}": apart(b, a[: box.numel])
        for i, (a, b) in enumerate(zip(*seen, strict=True))
    }
    return found | compared(serial, cut)


@pytest.mark.parametrize("numbers", [1, 10**6])
@pytest.mark.parametrize(
    "case", [backward_in_parts, two_graphs_at_once, gradients_by_name]
)
def test_only_whole_gradients_are_seen(
    case: Callable[[int], Differences], numbers: int
) -> None:
    assert_same(on_ranks(3, case, numbers))


def lying_as_parameters() -> list[tuple[Any, ...]]:
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)
    )
    model[:3].to(memory_format=torch.channels_last)
    whole = copy.deepcopy(model)
    cut = hetconv.parallelize(
        model, plan_of(model, splits_of(model, ("height",), (2, 1)), 2)
    )
    found = []
    for m in (whole, cut):
        m(
            torch.randn(1, 4, 6, 6).to(memory_format=torch.channels_last)
        ).square().mean().backward()
        found.append(
            tuple(
                (p.stride(), p.grad.stride())
                for p in m.parameters()
                if p.grad is not None
            )
        )
    return found


def test_gradients_lie_in_memory_as_their_parameters() -> None:
    for whole, cut in on_ranks(2, lying_as_parameters):
        assert [p for p, _ in cut] == [p for p, _ in whole]
        assert all(p == g for p, g in cut)


def lying_otherwise(kind: SplitKind) -> tuple[str, Differences]:
    """Of one rank alone, first where the model is cut, then later."""
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, 3)).double()
    rank = dist.get_rank()
    unlike = copy.deepcopy(serial).to(
        memory_format=torch.channels_last if rank == 1 else torch.contiguous_format
    )
    plan = plan_of(serial, splits_of(serial, (kind,), (2, 0, 1)), 3)
    with pytest.raises(hetconv.DisagreementError) as error:
        hetconv.parallelize(unlike, plan)
    cut = hetconv.parallelize(
        copy.deepcopy(serial).to(memory_format=torch.channels_last), plan
    )
    cut.to(memory_format=torch.contiguous_format if rank == 2 else torch.channels_last)
    x = torch.randn(3, 4, 9, 8, dtype=torch.float64)
    for model in (serial, cut):
        loss_of(model(x)).backward()
    return str(error.value), compared(serial, cut)


@pytest.mark.parametrize("kind", ["height", "sample"])
def test_sums_agree_on_the_order_of_memory(kind: SplitKind) -> None:
    answers = on_ranks(3, lying_otherwise, kind)
    assert_same([differences for _, differences in answers])
    assert all("channels-last" in said for said, _ in answers)


def contribution(rank: int) -> Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(rank))


def sum_of_contributions() -> tuple[Tensor, Counter[int]]:
    p = torch.zeros(1001, requires_grad=True)
    with count_sent() as sent:
        (g,) = torch.autograd.grad(
            synced_grad(rank_group_of(), p), p, contribution(dist.get_rank())
        )
    return g, sent


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_of_contributions_have_the_same_bits_on_every_rank(world: int) -> None:
    found = [g for g, _ in on_ranks(world, sum_of_contributions)]
    torch.testing.assert_close(found[0], sum(contribution(r) for r in range(world)))
    assert all(torch.equal(g, found[0]) for g in found)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_contributions_send_the_bytes_of_their_move(world: int) -> None:
    found = on_ranks(world, sum_of_contributions)
    sent = {
        (r, peer): n
        for r, (_, counts) in enumerate(found)
        for peer, n in counts.items()
    }
    assert sent == bytes_per_pair(all_reduce((1001,), world).forward, 4)
