"""Cached calls are not read again, and never taken for another call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hetconv
from hetconv.ops import call_cache, dispatch, trial_run
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.layout import Layout
from hetconv.signature_cache import RecentlyUsed
from tests.equivalence import Differences, apart, assert_same
from tests.placed import PLACEMENTS, SHAPE, WORLD, on_parts, placed
from tests.spawn import on_ranks

WHOLE = torch.linspace(-1, 1, torch.Size(SHAPE).numel(), dtype=torch.float64).reshape(
    SHAPE
)


def batch_norm(x: Tensor, params: dict[str, Tensor]) -> Tensor:
    return F.batch_norm(
        x, params["c"].detach(), params["c"].detach() + 1, params["c"], params["c"]
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "relu": lambda x, z, p: torch.relu(x),
    "relu_": lambda x, z, p: (x * 1).relu_(),
    "relu_ of x itself": lambda x, z, p: F.relu(x.clone(), inplace=True) + x,
    "x += z": lambda x, z, p: x.clone().add_(z),
    "x + z": lambda x, z, p: x + z,
    "x + x": lambda x, z, p: x + x,
    "x * number": lambda x, z, p: x * 2,
    "x * parameter": lambda x, z, p: x * p["full"],
    "x * one": lambda x, z, p: x * p["one"],
    "named": lambda x, z, p: torch.add(input=x, other=z),
    "batch norm": lambda x, z, p: batch_norm(x, p),
    "mean of space": lambda x, z, p: x.mean((2, 3)),
    "sum of samples": lambda x, z, p: torch.sum(x, 0, keepdim=True),
    "var of columns": lambda x, z, p: x.var(3),
    "maxima with indices": lambda x, z, p: x.max(1),
    "softmax": lambda x, z, p: F.softmax(x, 1),
    "cumsum in place": lambda x, z, p: (x * 1).cumsum_(1),
    "amax of space": lambda x, z, p: x.amax((2, 3)),
    "max pool": lambda x, z, p: F.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x, z, p: F.avg_pool2d(x, 3, 1, 1),
}


def twice(name: str, placement: str) -> list[Differences]:
    """The second time it is remembered, if it is."""
    return [on_parts(FUNCTIONS[name], placement) for _ in range(2)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_gives_the_same_again(name: str) -> None:
    for placement in PLACEMENTS:
        for found in zip(*on_ranks(WORLD, twice, name, placement), strict=True):
            assert_same(list(found))


def reads(calls: list[Callable[[HetTensor], Any]]) -> list[int]:
    """How many calls are read, of each of these."""
    counts, read = [], dispatch.read_call

    def counting(*args: Any) -> Any:
        counts[-1] += 1
        return read(*args)

    dispatch.read_call = counting
    try:
        for call in calls:
            x, _ = placed(WHOLE, PLACEMENTS["rows"])
            counts.append(0)
            call(x)
    finally:
        dispatch.read_call = read
    return counts


def without_autograd(call: Callable[[HetTensor], Any]) -> Callable[[HetTensor], Any]:
    def run(x: HetTensor) -> None:
        with torch.no_grad():
            call(x)

    return run


def counted() -> dict[str, list[int]]:
    call_cache._known.current.clear()  # what other tests called
    gain, c = torch.ones(SHAPE, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    trained = gain.clone().requires_grad_()
    normed = without_autograd(lambda x: F.batch_norm(x, c, c, trained[0, :, 0, 0], c))
    return {
        "softsign": reads([lambda x: F.softsign(x.abs())] * 2),
        "in place": reads([without_autograd(lambda x: x.sin_())] * 2),
        "with and without autograd": reads(
            [torch.tanh, without_autograd(torch.tanh), torch.tanh]
        ),
        "a number": reads([lambda x: x * 3, lambda x: x * 4, lambda x: x * 3]),
        "a part of what every rank has": reads([lambda x: x - gain] * 2),
        "batch norm in evaluation": reads([normed] * 2),
        "a list": reads([lambda x: torch.cat([x, x], 1)] * 2),
        "several views": reads([lambda x: x.chunk(2, 1)] * 2),
        "a view": reads([lambda x: x.permute(0, 2, 3, 1)] * 2),
        "a part": reads([lambda x: x[:, 1:], lambda x: x[:, 1:], lambda x: x[:, 2:]]),
        "another shape": reads([lambda x: x.reshape(*x.shape[:2], -1)] * 2),
        "a norm of rows": reads([lambda x: F.layer_norm(x, x.shape[-1:])] * 2),
        "a partial mean": reads([lambda x: x.mean((2, 3))] * 2),
        "a softmax": reads([lambda x: F.softmax(x, 1)] * 2),
        "several results": reads([lambda x: x.max(1)] * 2),
        "an extreme": reads([lambda x: x.amax(2), lambda x: x.amax(3)] * 2),
        "a pool": reads([lambda x: F.max_pool2d(x, 3, 2, 1)] * 2),
    }


def test_what_moves_nothing_is_read_once() -> None:
    expected = {
        "softsign": [2, 0],
        "in place": [1, 0],
        "with and without autograd": [1, 1, 0],
        "a number": [1, 1, 0],
        "a part of what every rank has": [1, 1],
        "batch norm in evaluation": [1, 0],
        "a list": [1, 0],
        "several views": [1, 0],
        "a view": [1, 0],
        "a part": [1, 0, 1],
        "another shape": [1, 0],
        "a norm of rows": [1, 0],
        "a partial mean": [1, 0],
        "a softmax": [1, 0],
        "several results": [1, 0],
        "an extreme": [1, 1, 0, 0],
        "a pool": [1, 0],
    }
    assert on_ranks(WORLD, counted) == [expected] * WORLD


def after_partial() -> list[float]:
    """A call in place on a partial sum leaves it cut; the next partial sum must be
    summed all the same.
    """
    found = []
    for _ in range(3):
        x, _ = placed(WHOLE, PLACEMENTS["partial"])
        with torch.no_grad():
            y = HetTensor.wrap(x.local.detach().clone(), x.placement, x.group).relu_()
            found.append((hetconv.gather(y) - WHOLE.relu()).abs().max().item())
    return found


def test_a_partial_sum_is_summed_every_time() -> None:
    for found in on_ranks(WORLD, after_partial):
        assert max(found) < 1e-12


def trials() -> list[int]:
    """How often a call runs on meta tensors: first, and in two other signatures."""
    counts, on_meta = list[int](), trial_run._on_meta

    def counting(*args: Any) -> Any:
        counts[-1] += 1
        return on_meta(*args)

    x, _ = placed(WHOLE, PLACEMENTS["rows"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_run, "_on_meta", counting)
        patch.setattr(trial_run, "_recent", RecentlyUsed(1))
        for call in (torch.tanh, torch.tanh, torch.sinh, torch.tanh):
            counts.append(0)
            trial_run._known.current.clear()
            call_cache._known.current.clear()
            call(x)
    return counts


def test_a_call_is_tried_once_for_each_memory_format_and_not_for_each_signature() -> (
    None
):
    formats = 3  # contiguous, channels-last and reversed
    assert on_ranks(WORLD, trials) == [[formats, 0, formats, formats]] * WORLD


def norms_after_a_tied_one() -> list[float]:
    """Norms whose weight is their bias too, then norms of the same signature with two."""
    x, _ = placed(WHOLE, Layout.sharded(SHAPE, 2, (2, 3, 1)))
    c = WHOLE.shape[1]
    one, two = (torch.linspace(k, k + 1, c, dtype=WHOLE.dtype) for k in (1, 3))
    functions = [
        lambda x, a, b: F.group_norm(x, 2, a, b),
        lambda x, a, b: F.batch_norm(x, None, None, a, b, training=True),
        lambda x, a, b: F.layer_norm(
            x, x.shape[-1:], a[: x.shape[-1]], b[: x.shape[-1]]
        ),
    ]
    found = []
    for function in functions:
        for a, b in ((one, one), (one, two)):
            expected = function(WHOLE, a, b)
            found.append(apart(hetconv.gather(function(x, a, b)), expected))
    return found


def test_a_parameter_in_two_roles_does_not_decide_for_others() -> None:
    for found in on_ranks(WORLD, norms_after_a_tied_one):
        assert max(found) < 1e-10


def outlives_its_call() -> bool:
    """Whether a tensor that only gave its shape to a view is kept."""
    layout = Layout.sharded(SHAPE, 2, (2, 3, 1))
    with torch.no_grad():
        x, z = placed(WHOLE, layout)[0], placed(WHOLE, layout)[0]
        kept = ref(z)
        x[:, :1].expand_as(z)
        del x, z
    gc.collect()
    return kept() is not None


def test_a_view_keeps_no_tensor_whose_shape_it_takes() -> None:
    assert not any(on_ranks(WORLD, outlives_its_call))
