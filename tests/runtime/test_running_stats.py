"""Running statistics of norms that are cut over channels: who knows what, and when all
ranks are told.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetconv
from hetconv.comm import redistribute
from hetconv.comm.rank_group import rank_group_of
from hetconv.runtime.running_stats import RunningStats
from hetconv.sharding.layout import Layout
from tests.equivalence import Differences, apart, assert_same, pair, same_state
from tests.nets import splits_of
from tests.placed import placed
from tests.spawn import on_ranks

RATIO = (2, 0, 1)


@contextmanager
def rounds_counted() -> Iterator[list[int]]:
    """Of messages, while the context lasts; one number."""
    counted, start = [0], redistribute._started

    def counting(*args: object) -> object:
        counted[0] += 1
        return start(*args)  # type: ignore[arg-type]

    redistribute._started = counting  # type: ignore[assignment]
    try:
        yield counted
    finally:
        redistribute._started = start


def told(wanted: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Differences, int]:
    """Statistics of some norms, with these cuts and dtypes, of which each rank knows
    its own channels; rounds of it.
    """
    group, norms = rank_group_of(), []
    running = RunningStats(group)
    for k, (sizes, dtype) in enumerate(wanted):
        whole = torch.arange(2.0 * sum(sizes), dtype=dtype).view(2, -1) + 100 * k
        mine = (
            Layout.sharded(whole.shape, 1, sizes)
            .boxes[group.rank]
            .slices_in(Layout.replicated(whole.shape, 3).boxes[0])
        )
        known = torch.full_like(whole, -1)
        known[mine] = whole[mine]
        mean, var = (t.clone() for t in known)
        running.note(
            (mean, var),
            sizes,
            torch.float64 if dtype == torch.float64 else torch.float32,
        )
        norms.append((mean, var, whole))
    with rounds_counted() as counted:
        running.sync()
        running.sync()  # there is nothing left to tell
    of_norms = enumerate(norms)
    return {
        f"{k}": apart(torch.stack((mean, var)), whole)
        for k, (mean, var, whole) in of_norms
    }, counted[0]


def test_all_are_told_each_channel_by_its_owner_in_a_round_for_each_dtype() -> None:
    single, double = torch.float32, torch.float64
    wanted = [
        ((2, 0, 1), single),
        ((0, 5, 0), double),
        ((1, 1, 2), single),
        ((3, 3, 3), double),
        ((0, 1, 1), single),
    ]
    for found, rounds in on_ranks(3, told, wanted):
        assert_same([found])
        assert rounds == 2


class Norms(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        blocks = (
            (nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(count)
        )
        self.blocks = nn.Sequential(*(module for block in blocks for module in block))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


def rounds_of_a_step(count: int) -> tuple[int, int]:
    """Rounds of a forward, in training and not."""
    _, cut = pair(lambda: Norms(count), splits_of(Norms(count), ("filter",), RATIO), 3)
    found = []
    for training in (True, False):
        cut.train(training)
        with rounds_counted() as counted:
            cut(torch.randn(2, 4, 5, 5))
        found.append(counted[0])
    return found[0], found[1]


@pytest.mark.parametrize("count", [1, 5])
def test_norms_cost_one_round_a_step_however_many_there_are(count: int) -> None:
    for training, evaluating in on_ranks(3, rounds_of_a_step, count):
        assert training == evaluating + 1


class Reused(nn.Module):
    """One norm on differently cut parts, on a whole, and evaluated before the forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        y = self.norm(self.b(y) + 1)
        y = self.norm(hetconv.gather(y) * 2)
        y = self.norm(self.a(y[:, :3]) - 1)
        n = self.norm
        return F.batch_norm(self.b(y), n.running_mean, n.running_var, n.weight, n.bias)


def reused(b: hetconv.Split) -> Differences:
    serial, cut = pair(Reused, {"a": hetconv.Split("filter", (4, 0, 2)), "b": b}, 3)
    found: Differences = {}
    for step in range(3):
        x = torch.randn(2, 3, 8, 8)
        y, y_serial = cut(x), serial(x)
        found |= {f"{step}": apart(y, y_serial)}
        for each in (y, y_serial):
            each.square().mean().backward()
        found |= {
            f"{step} {name}": value for name, value in same_state(serial, cut).items()
        }
    return found


@pytest.mark.parametrize(
    "b", [("filter", (4, 0, 2)), ("filter", (1, 3, 2)), ("height", (2, 1, 5))]
)
def test_a_norm_that_is_used_in_several_ways_within_a_forward(
    b: tuple[hetconv.SplitKind, tuple[int, ...]],
) -> None:
    assert_same(on_ranks(3, reused, hetconv.Split(*b)))


class Raises(Norms):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.fails:
            raise ValueError("in the middle")
        return y


def after_an_error() -> Differences:
    """The norms before it were updated, as on one device; whoever uses them next finds them so."""
    serial, cut = pair(lambda: Raises(2), splits_of(Raises(2), ("filter",), RATIO), 3)
    for model in (serial, cut):
        model.fails = True
        torch.manual_seed(3)
        with pytest.raises(ValueError, match="in the middle"):
            model(torch.randn(2, 4, 5, 5))
        model.fails = False
        model.eval()
    x = torch.randn(2, 4, 5, 5)
    return {"evaluated": apart(cut(x), serial(x))} | same_state(serial, cut)


def test_what_a_forward_that_raised_an_error_did_not_tell_is_told_before_the_next() -> (
    None
):
    assert_same(on_ranks(3, after_an_error))


def outside_a_model() -> Differences:
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64)
    own, serial = ([torch.zeros(6).double(), torch.ones(6).double()] for _ in range(2))
    part, _ = placed(x, Layout.sharded(x.shape, 1, (3, 0, 3)))
    y, y_serial = (
        F.batch_norm(part, *own, training=True),
        F.batch_norm(x, *serial, training=True),
    )
    at_once = {
        name: apart(a, b)
        for name, a, b in zip(("mean", "var"), own, serial, strict=True)
    }
    return at_once | {"result": apart(hetconv.gather(y), y_serial)}


def test_outside_a_model_all_ranks_are_told_at_once() -> None:
    assert_same(on_ranks(3, outside_a_model))


def copied() -> Differences:
    """A copy of a model has statistics of its own."""
    serial, cut = pair(lambda: Norms(2), splits_of(Norms(2), ("filter",), RATIO), 3)
    again, x = copy.deepcopy(cut), torch.randn(2, 4, 5, 5)
    before = {
        f"copy {name}": value for name, value in same_state(serial, again).items()
    }
    serial(x), cut(x)
    return (
        before
        | same_state(serial, cut)
        | {
            "apart": float(
                apart(*(m.blocks[1].running_mean for m in (cut, again))) == 0
            )
        }
    )


def test_a_copy_has_its_own() -> None:
    assert_same(on_ranks(3, copied))
