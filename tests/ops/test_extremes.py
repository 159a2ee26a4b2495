"""Extremes of dimensions that are cut: ranks exchange extremes of their own shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hetconv
from hetconv.operators.reductions import Extreme
from hetconv.sharding.layout import Box, Layout
from tests.placed import PLACEMENTS, SHAPE, WORLD, full_gradient, placed
from tests.spawn import on_ranks

Function = Callable[[Tensor], Tensor]
EXTREMES: dict[str, Function] = {
    "amax of space": lambda x: x.amax((2, 3)),
    "amin of columns kept": lambda x: torch.amin(x, 3, keepdim=True),
    "amax of channels and rows": lambda x: x.amax(dim=(-2, 1), keepdim=True),
    "amin of samples": lambda x: torch.amin(input=x, dim=0),
    "amax of all": lambda x: x.amax(),
}
CUTS = [
    name
    for name, layout in PLACEMENTS.items()
    if layout.kind == "sharded" and "nodes" not in name
]


def tied(dtype: torch.dtype) -> Tensor:
    """Four values, of which each is many times in every shard."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 4, SHAPE, generator=generator).to(dtype)


def unordered(dtype: torch.dtype) -> Tensor:
    """A sample with a single NaN, one of minus infinities, one of infinities."""
    x = tied(dtype)
    x[0, 3, 2, 1] = torch.nan
    x[1] = -torch.inf
    x[2] = torch.inf
    return x


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(9), b.nan_to_num(9))


def same_everywhere(make: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> bool:
    """Whether values and gradients have the bits of the whole tensor's."""
    x_true = make(dtype).requires_grad_(dtype.is_floating_point)
    found = []
    for fn in EXTREMES.values():
        expected = fn(x_true)
        g = torch.rand(expected.shape, generator=torch.Generator().manual_seed(2))
        for place in CUTS:
            x, local = placed(x_true.detach(), PLACEMENTS[place])
            y = hetconv.gather(fn(x))
            found.append(same(y, expected))
            if dtype.is_floating_point:
                (of_x,) = torch.autograd.grad(
                    expected, x_true, g.to(dtype), retain_graph=True
                )
                y.backward(g.to(dtype))
                found.append(same(full_gradient(local, PLACEMENTS[place]), of_x))
    return all(found)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("make", [tied, unordered])
def test_ties_share_the_gradient_as_on_one_device(
    make: Callable[[torch.dtype], Tensor], dtype: torch.dtype
) -> None:
    assert all(on_ranks(WORLD, same_everywhere, make, dtype))


def large(dtype: torch.dtype) -> Tensor:
    """Integers next to each other that no float holds."""
    return tied(dtype) + (torch.iinfo(dtype).max - 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_are_exact(dtype: torch.dtype) -> None:
    assert all(on_ranks(WORLD, same_everywhere, large, dtype))


def truths() -> bool:
    found = []
    for whole in (tied(torch.float32) > 2, tied(torch.uint8), tied(torch.float64)):
        for fn in (Tensor.any, Tensor.all):
            for dim in (1, (2, 3)):
                for place in CUTS:
                    x, _ = placed(whole, PLACEMENTS[place])
                    y = hetconv.gather(fn(x, dim))  # type: ignore[arg-type]
                    found.append(same(y, fn(whole, dim)))  # type: ignore[arg-type]
    return all(found)


def test_any_and_all() -> None:
    assert all(on_ranks(WORLD, truths))


def penalty(x: Tensor, local: Tensor, weights: Tensor, fn: Function) -> None:
    """Backward of a penalty on the gradient of the squared extremes."""
    y = hetconv.gather(fn(x))
    (gx,) = torch.autograd.grad(y.pow(3).sum(), local, create_graph=True)
    (gx.square() * weights).sum().backward()


def penalized_alike() -> bool:
    weights, found = torch.rand(SHAPE, dtype=torch.float64), []
    dist.broadcast(weights, 0)
    for fn in EXTREMES.values():
        x_true = tied(torch.float64).requires_grad_()
        penalty(x_true, x_true, weights, fn)
        assert x_true.grad is not None
        for place in CUTS:
            layout = PLACEMENTS[place]
            x, local = placed(x_true.detach(), layout)
            own = layout.boxes[dist.get_rank()].slices_in(Box.whole(SHAPE))
            penalty(x, local, weights[own], fn)
            gradient = full_gradient(local, layout)
            assert gradient is not None
            found.append(torch.allclose(gradient, x_true.grad, rtol=1e-12))
    return all(found)


def test_gradients_are_differentiated_again() -> None:
    assert all(on_ranks(WORLD, penalized_alike))


def bytes_sent() -> tuple[int, int]:
    """To one other rank: forward, and backward."""
    x, _ = placed(torch.rand(SHAPE), PLACEMENTS["rows"])
    other = (dist.get_rank() + 1) % WORLD
    with hetconv.count_sent() as sent:
        y = hetconv.gather(x.amax((2, 3)))
    with hetconv.count_sent() as sent_back:
        y.sum().backward()
    return sent[other], sent_back.get(other, 0)


def test_a_value_and_a_count_of_each_image_are_sent() -> None:
    assert set(on_ranks(WORLD, bytes_sent)) == {(2 * 4 * 8 * 4, 0)}


@pytest.mark.parametrize("counts_ties", [True, False])
def test_ranks_without_a_shard_send_nothing(counts_ties: bool) -> None:
    op = Extreme((4, 8), (2, 3), False, False, counts_ties)
    x = Layout.sharded(SHAPE, 2, (2, 0, 4))
    sharding = op.sharding((x,))
    assert sharding.input_layouts == (x,)
    assert sharding.output == Layout.replicated((4, 8), 3)
    (move,) = sharding.forward_moves
    numbers = 2 if counts_ties else 1
    assert [box.shape for box in move.src.boxes] == [
        (1, numbers, 32),
        (0, numbers, 32),
        (1, numbers, 32),
    ]


def test_a_cut_of_other_dimensions_stays() -> None:
    x = Layout.sharded(SHAPE, 1, (3, 5))
    sharding = Extreme((4, 8), (2, 3), False, False, True).sharding((x,))
    assert sharding.output == Layout.sharded((4, 8), 1, (3, 5))
    assert not sharding.forward_moves
