"""Views, shapes, reductions and softmax on shards: what they give, whom they share
memory with, and what they send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.operators.reductions import AlongDim, Extreme, Reduction
from hetconv.operators.shapes import Reshape, Stack
from hetconv.operators.views import SplitView, View
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.layout import Layout
from hetconv.sharding.rule import Operator
from hetconv.sharding.split import Split
from tests.equivalence import Differences, apart, assert_same
from tests.placed import PLACEMENTS, SHAPE, WORLD, Fn, gathered, on_parts
from tests.spawn import on_ranks

VIEWS: dict[str, Fn] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute by function": lambda x: torch.permute(x, (3, -1 - 1, 0, 1)),
    "transpose": lambda x: x.transpose(1, -1),
    "swapaxes": lambda x: torch.swapaxes(x, axis0=0, axis1=2),
    "swapdims": lambda x: x.swapdims(1, 2),
    "movedim": lambda x: x.movedim(1, -1),
    "moveaxis": lambda x: torch.moveaxis(x, (0, 3), (2, 0)),
    "mT": lambda x: x.mT,
    "t": lambda x: x[:, :, 1, 2].t(),
    "T": lambda x: x[:, 2, :, 0].T,
    "unsqueeze": lambda x: x.unsqueeze(2),
    "unsqueeze last": lambda x: torch.unsqueeze(x, -1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze all": lambda x: x[None, :, :, None].squeeze(),
    "squeeze nothing": lambda x: x.squeeze(1),
    "squeeze some": lambda x: x[None, :, None].squeeze((0, 2)),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "expand with more": lambda x: x.expand(2, *x.shape),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "a row": lambda x: x[:, :, 3],
    "a channel": lambda x: x[:, -1],
    "a sample": lambda x: x[0],
    "some rows": lambda x: x[:, :, 1:4],
    "no rows": lambda x: x[:, :, 4:2],
    "from the end": lambda x: x[..., -3:, :-1],
    "new dimensions": lambda x: x[:, None, ..., None, 2],
    "everything": lambda x: x[...],
    "every second row": lambda x: x[:, :, ::2],
    "every second pixel": lambda x: x[..., 1::2, ::2],
    "every third channel of some": lambda x: x[:, 1:-1:3, None, 2],
    "every fifth sample": lambda x: x[::5],
    "no rows in steps": lambda x: x[:, :, 3:1:2],
    "rows by a list": lambda x: x[:, :, [0, 2]],
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(-2, 2, 3),
    "narrow from the end": lambda x: torch.narrow(x, 1, -4, 2),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "split": lambda x: x.split(4, 2)[0],
    "split in sizes": lambda x: torch.split(x, [1, 4], dim=3)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "permute and slice": lambda x: x.permute(0, 2, 3, 1)[:, 2:, :, 1:6],
    "reshape heads": lambda x: x.reshape(4, 2, 4, 6, 5),
    "reshape rows together": lambda x: x.reshape(4, 8, 30),
    "reshape all": lambda x: x.reshape(-1),
    "reshape across": lambda x: x.reshape(2, 2, 8, 30),
    "view": lambda x: x.view(32, -1, 5),
    "view by size": lambda x: x.view(torch.Size((4, 8, 2, 3, 5))),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "flatten": lambda x: x.flatten(2),
}


def shuffled(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


REDUCTIONS: dict[str, Fn] = {
    "mean of space": lambda x: x.mean((2, 3)),
    "mean of space kept": lambda x: x.mean(dim=[-2, -1], keepdim=True),
    "mean of channels": lambda x: x.mean(1, True),
    "mean of all": lambda x: x.mean(),
    "mean in double": lambda x: x.float().mean((0, 2), dtype=torch.float64),
    "sum of rows": lambda x: torch.sum(x, 2),
    "sum of samples": lambda x: x.sum(0, keepdim=True),
    "sum of all": lambda x: x.sum(),
    "sum of truths": lambda x: (x > 1).sum((1, 2)),
    "sum of columns by another name": lambda x: x.sum(axis=3),
    "amax of channels": lambda x: x.amax(1),
    "amax of space": lambda x: torch.amax(x, (2, 3), True),
    "amin of all": lambda x: x.amin(),
    "max with indices": lambda x: x.max(1),
    "min of samples by name": lambda x: torch.min(x, dim=0, keepdim=True).indices,
    "max of all": lambda x: x.max() + torch.max(x * 2),
    "max of two": lambda x: torch.max(x, x.flip(1)) + torch.min(x, other=x * 0.9),
    "median": lambda x: x.median(3)[0],
    "argmax of channels": lambda x: x.argmax(1),
    "argmin of columns kept": lambda x: torch.argmin(x, dim=-1, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
    "prod": lambda x: x.prod(2),
    "any and all": lambda x: (x > 1.4).any(1) | (x > 0.6).all(dim=1),
    "count": lambda x: (x > 1).count_nonzero(1),
    "norm of channels": lambda x: x.norm(dim=1, keepdim=True),
    "norm by 1 of rows": lambda x: torch.norm(x, 1, 2),
    "norm of all": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, (0, 1)),
    "normalize": lambda x: F.normalize(x, dim=1) + F.normalize(x, 1.0, -1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(3)),
    "var_mean": lambda x: torch.var_mean(x, 1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1) + torch.cumprod(x, dim=3),
    "cumsum in place": lambda x: (x * 1).cumsum_(0),
    "cummax": lambda x: x.cummax(2),
    "sort": lambda x: x.sort(1, descending=True),
    "sort of columns": lambda x: torch.sort(x)[0],
    "argsort": lambda x: x.argsort(dim=1),
    "topk": lambda x: x.topk(2, 1),
    "glu": lambda x: F.glu(x, 1),
    "flip": lambda x: x.flip(1, 3),
    "flip rows": lambda x: torch.flip(x, [2]),
    "roll": lambda x: x.roll(2, 1),
    "roll space": lambda x: torch.roll(x, (1, -2), dims=(2, 3)),
    "roll of all": lambda x: x.roll(7),
    "var of channels": lambda x: x.var(1, unbiased=False, keepdim=True),
    "var of space": lambda x: torch.var(x, (2, 3), correction=0),
    "std of samples": lambda x: x.std(0),
    "var of all": lambda x: x.var(),
    "logsumexp": lambda x: torch.logsumexp(x, 3),
    "softmax of channels": lambda x: F.softmax(x, 1),
    "softmax of columns": lambda x: x.softmax(-1),
    "log_softmax of rows": lambda x: torch.log_softmax(x, 2),
    "softmax in double": lambda x: torch.softmax(x, 0, torch.float64),
    "standardized": lambda x: (
        (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1).sqrt()
    ),
    "squeezed": lambda x: x * x.mean((2, 3), keepdim=True).expand_as(x),
    "shuffled": shuffled,
    "gated": lambda x: (lambda a, b: a * b)(*x.chunk(2, 1)),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "stack last": lambda x: torch.stack((x, 1 / x), dim=-1),
    "loss": lambda x: x.square().mean() + x.sum() * 0.1,
}


def of_view(take: Fn) -> Callable[[Tensor], Any]:
    """What was taken, the whole after it was written to, and it after the whole was written to."""

    def fn(x: Tensor) -> Any:
        y = x * 1
        v = take(y)
        read = v * 2
        w = take(y)
        w.mul_(3)
        y.add_(1)
        return read, v + 0, w + 0, y + 0

    return fn


def writing(x: Tensor) -> Any:
    """A view, a view of it, one of parts and one of wholes, written to by each of them in turn."""
    y = x * 1
    v = y.permute(0, 2, 3, 1)
    u = v[..., 2:5]
    u.mul_(2)
    flat = y.flatten(1)
    v.sub_(x.permute(0, 2, 3, 1) / 2)
    flat[:, 3] = 7.0
    whole = u[1]
    whole.add_(1)
    y.clamp_(0.7, 5.0)
    return y + 0, v + 0, u + 0, flat + 0, whole + 0


def written_where_it_moves(x: Tensor) -> Any:
    """A call in place that cannot leave the layout as it is."""
    y = x * 1
    v = y.transpose(0, 1)
    v.copy_(torch.ones(8, 4, 6, 5, dtype=x.dtype).cumsum(2))
    y[:, :, 2] = 5.0
    return v + 0, y + 0, v[0] + 0


def sums_written_to(x: Tensor) -> Any:
    """A view of a sum that every rank has a summand of."""
    y = x.mean((2, 3))
    v = y.t()
    v.mul_(y.t() + 1)
    return v + 0, y + 0


def without_grad(x: Tensor) -> Any:
    """A view taken with autograd goes on with it after a write without."""
    y = x * 1
    v = y.permute(0, 2, 3, 1)
    with torch.no_grad():
        v[0, 2] = 0.5
    return v * 2, y * 3


WRITES: dict[str, Fn] = {
    "writing": writing,
    "sums written to": sums_written_to,
    "written where it moves": written_where_it_moves,
    "no_grad": without_grad,
}
WRITES |= {
    f"write to {name}": of_view(take)
    for name, take in VIEWS.items()
    if "expand" not in name
}
MULTIPLE = (
    "chunk",
    "split",
    "split in sizes",
    "tensor_split",
    "unbind",
)  # torch allows no writing to these
FUNCTIONS = (
    VIEWS
    | REDUCTIONS
    | {k: v for k, v in WRITES.items() if k.removeprefix("write to ") not in MULTIPLE}
)


def everywhere(name: str, dtype: torch.dtype) -> Differences:
    found = {
        place: on_parts(lambda x, z, p: FUNCTIONS[name](x), place, dtype)
        for place in PLACEMENTS
    }
    return {
        f"{place}: {what}": value
        for place, all_ in found.items()
        for what, value in all_.items()
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_parts_as_on_one_device(name: str) -> None:
    assert_same(on_ranks(WORLD, everywhere, name, torch.float64))


WHOLE_OVER_ROWS = {
    "amax of space",
    "amin of all",
    "argmax of all",
    "cummax",
    "flip rows",
    "log_softmax of rows",
    "loss",
    "max of all",
    "norm by 1 of rows",
    "norm of all",
    "prod",
    "roll of all",
    "roll space",
    "var of all",
    "var of space",
}


def found() -> set[tuple[str, str]]:
    return gathered(
        {name: lambda x, z, p, fn=fn: fn(x) for name, fn in REDUCTIONS.items()},
        ["rows"],
    )


def test_everything_else_runs_on_parts() -> None:
    expected = {(name, "rows") for name in WHOLE_OVER_ROWS}
    assert all(names == expected for names in on_ranks(WORLD, found))


STAYS: dict[str, tuple[Operator, Layout]] = {
    "permute": (
        View((4, 6, 5, 8), tuple((0, n) for n in SHAPE), (0, 2, 3, 1)),
        Layout.sharded((4, 6, 5, 8), 1, (1, 2, 3)),
    ),
    "a slice of the cut": (
        View((4, 8, 3, 5), ((0, 4), (0, 8), (2, 5), (0, 5)), (0, 1, 2, 3)),
        Layout.sharded((4, 8, 3, 5), 2, (0, 1, 2)),
    ),
    "rows and columns": (
        Reshape((4, 8, 30)),
        Layout.sharded((4, 8, 30), 2, (5, 10, 15)),
    ),
    "mean": (
        Reduction((4, 8), (2, 3), False, True),
        Layout.partial((4, 8), WORLD, (1, 2, 3)),
    ),
    "amax": (
        Extreme((4, 6, 5), (1,), False, False, True),
        Layout.sharded((4, 6, 5), 1, (1, 2, 3)),
    ),
    "softmax": (AlongDim(SHAPE, (1,)), PLACEMENTS["rows"]),
    "stack": (Stack((2, *SHAPE), 0), Layout.sharded((2, *SHAPE), 3, (1, 2, 3))),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_height_cut_stays_and_moves_nothing(name: str) -> None:
    op, output = STAYS[name]
    x = PLACEMENTS["rows"]
    sharding = op.sharding((x,), Split("replicate"))
    assert (sharding.input_layouts, sharding.output) == ((x,), output)


def test_pieces_along_the_cut_are_gathered() -> None:
    halves = tuple(
        View((4, 8, 3, 5), ((0, 4), (0, 8), (lo, lo + 3), (0, 5)), (0, 1, 2, 3))
        for lo in (0, 3)
    )
    assert all(
        s.output.kind == "replicated"
        for s in SplitView(halves, 2).shardings((PLACEMENTS["rows"],))
    )


def flat_after_a_write() -> Differences:
    layout, whole = PLACEMENTS["columns"], torch.rand(SHAPE, dtype=torch.float64)
    torch.distributed.broadcast(whole, 0)
    box = layout.boxes[torch.distributed.get_rank()]
    part = whole[..., box.lo[3] : box.hi[3]].contiguous(
        memory_format=torch.channels_last
    )
    x = HetTensor.wrap(part, layout, rank_group_of())
    flat = x.flatten(1, 2)
    x.mul_(2)
    return {
        "flat": apart(hetconv.gather(flat), 2 * whole.flatten(1, 2)),
        "x": apart(hetconv.gather(x), 2 * whole),
    }


def test_a_view_that_is_a_copy_on_parts_sees_what_is_written() -> None:
    assert_same(on_ranks(WORLD, flat_after_a_write))
