"""Triton's passes of norms at the edges: cut, empty, huge and other images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetconv.kernels import norms
from tests.interpreter import DEVICE, ON_GPU
from tests.kernels.triton.norm_cases import (
    EPS,
    image,
    numbers,
)

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")


@pytest.mark.usefixtures("by_triton")
def test_images_that_are_cut_along_several_dimensions() -> None:
    """They are copied, and a result is."""
    whole = image((2, 3, 4, 5, 6), "contiguous", "float32", 0, 1.0)
    x = whole[:, :, 1:3, 1:4, :5]
    mean, invstd, *factors = numbers((2, 3), 5)
    expected = norms.normalized(x.contiguous(), mean, invstd, None, None, EPS)
    norms.normalize_to(
        y := torch.empty_like(whole)[:, :, 1:3, 1:4, :5],
        x,
        mean,
        invstd,
        None,
        None,
        EPS,
    )
    assert y.equal(expected)
    dense = x.contiguous()
    assert norms.moments(x, torch.float32, 3).equal(
        norms.moments(dense, torch.float32, 3)
    )
    assert norms.sums(x, x, mean, invstd).equal(norms.sums(dense, dense, mean, invstd))
    assert norms.combination(x, x, *factors).equal(
        norms.combination(dense, dense, *factors)
    )


@pytest.mark.usefixtures("by_triton")
def test_numbers_may_be_expanded_and_an_image_overwritten() -> None:
    x = image((2, 4, 3, 2), "contiguous", "float32", 0)
    one = torch.full((1, 1), 2.0, device=DEVICE)
    expected = norms.normalized(x, one.repeat(2, 4), one.repeat(2, 4), None, None, EPS)
    norms.normalize_to(x, x, one.expand(2, 4), one.expand(2, 4), None, None, EPS)
    assert x.equal(expected)


@pytest.mark.usefixtures("by_triton")
def test_a_channel_of_one_value_has_no_variance() -> None:
    var, mean = norms.moments(
        torch.full((2, 3, 4, 5), 7.0, device=DEVICE), torch.float32, 3
    )
    assert (var == 0).all()
    assert (mean == 7).all()


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2)])
@pytest.mark.usefixtures("by_triton")
def test_nothing_gives_nothing(shape: tuple[int, ...], launched: list[str]) -> None:
    x = torch.empty(shape, device=DEVICE)
    a, b, c = numbers(shape[:2], 3)
    assert norms.normalized(x, a, b, None, None, EPS).shape == shape
    assert norms.combination(x, x, a, b, c).shape == shape
    assert norms.sums(x, x, a, b).equal(torch.zeros((2, *shape[:2]), device=DEVICE))
    assert not launched


@pytest.mark.usefixtures("by_triton")
def test_aten_computes_in_float64(launched: list[str]) -> None:
    x = image((2, 4, 3, 2), "contiguous", "float32", 0).double()
    assert norms.moments(x, torch.float64, 2).dtype == torch.float64
    assert not launched


@pytest.mark.skipif(ON_GPU, reason="on which Triton is chosen")
def test_aten_computes_on_a_cpu_unless_triton_is_asked_for(launched: list[str]) -> None:
    norms.moments(image((2, 4, 3, 2), "contiguous", "float32", 0), torch.float32, 2)
    assert not launched


@pytest.mark.parametrize(("N", "stride"), [(2, 2**31 + 16), (3, 2**30)])
@pytest.mark.usefixtures("by_triton")
def test_images_beyond_32_bits(
    N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    t = image((N, 4, 3, 2), "channels last", "float16", 0)
    x = sparse(t, stride)
    a, b, c = numbers((N, 4), 3)
    same = norms.moments(x, torch.float32, 2), norms.moments(t, torch.float32, 2)
    assert same[0].equal(same[1])
    assert norms.sums(x, t, a, b).equal(norms.sums(t, t, a, b))
    assert norms.combination(t, x, a, b, c).equal(norms.combination(t, t, a, b, c))
    y = sparse(t, stride).fill_(torch.nan)
    norms.normalize_to(y, x, a, b, None, None, EPS)
    assert y.equal(norms.normalized(t, a, b, None, None, EPS))
