"""The passes that norms on shards consist of, against plain formulas in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from hetconv.kernels import CHANNELS_LAST
from hetconv.kernels.epilogue import activate
from hetconv.kernels.norms import (
    combination,
    moments,
    moments_of_channels,
    normalize_to,
    normalized,
    sums,
)
from hetconv.kernels.norms.aten import affine

SHAPES = [(3, 5), (2, 5, 7), (2, 5, 4, 3), (1, 5, 4, 3), (2, 3, 4, 3, 2), (1, 4, 1, 1)]
FORMATS = ("contiguous", "channels last", "strided")
ERRORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
CASES = [
    case
    for case in product(SHAPES, FORMATS, ERRORS)
    if case[1] != "channels last" or len(case[0]) in CHANNELS_LAST
]
every_case = pytest.mark.parametrize(("shape", "memory", "dtype"), CASES)


def made(shape: tuple[int, ...], memory: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns random numbers around 3 in a memory format."""
    generator = torch.Generator().manual_seed(seed)
    if memory == "strided":
        wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
        return (wide + 3).to(dtype)[..., ::2]
    x = (torch.randn(shape, generator=generator) + 3).to(dtype)
    if memory == "channels last":
        x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    return x


def numbers(x: Tensor, count: int) -> list[Tensor]:
    """Returns random (N, C) in float32 at least."""
    exact = torch.promote_types(x.dtype, torch.float32)
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(x.shape[:2], generator=generator).to(exact) for _ in range(count)
    ]


def over(t: Tensor, x: Tensor) -> Tensor:
    return t.double().view(*t.shape, *(1,) * (x.dim() - 2))


def close(found: Tensor, expected: Tensor, limit: float) -> bool:
    scale = expected.abs().max().clamp(min=1)
    return bool((found.double() - expected).abs().max() <= limit * scale)


@every_case
def test_moments(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    x = made(shape, memory, dtype, 0)
    exact = torch.promote_types(dtype, torch.float32)
    limit = min(ERRORS[dtype], 1e-5)  # also of half precision, in single precision
    for groups in {1, x.shape[1]}:
        var, mean = found = moments(x, exact, groups)
        assert found.dtype == exact
        flat = x.double().reshape(len(x), groups, -1)
        assert close(mean, flat.mean(2), limit)
        assert close(var, flat.var(2, correction=0), limit)


@pytest.mark.parametrize("memory", FORMATS[:2])
def test_variances_far_from_zero(memory: str) -> None:
    """A mean of squares less the square of the mean would have no digit left."""
    x = made((2, 4, 16, 16), memory, torch.float32, 0) + 1e4
    x64 = x.double()
    for groups in (1, 4):
        found = moments(x, torch.float32, groups)[0]
        expected = x64.reshape(2, groups, -1).var(2, correction=0)
        assert close(found, expected, 1e-3)
    found = moments_of_channels(x, torch.float32)[0]
    assert close(found, x64.var((0, 2, 3), correction=0), 1e-3)


@pytest.mark.parametrize("groups", [1, 2, 16, 80])
@pytest.mark.parametrize("side", [8, 40])
def test_moments_of_large_and_small_maps(side: int, groups: int) -> None:
    x = made((2, 80, side, side), "channels last", torch.float32, 0)
    var, mean = moments(x, torch.float32, groups)
    flat = x.double().reshape(2, groups, -1)
    assert close(mean, flat.mean(2), 1e-5)
    assert close(var, flat.var(2, correction=0), 1e-5)


@every_case
def test_normalized(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    x = made(shape, memory, dtype, 0)
    mean, var, a, b = numbers(x, 4)
    var, weight, bias = var.square(), a[0], b[0]
    unscaled = (x.double() - over(mean, x)) / (over(var, x) + 0.1).sqrt()
    y = normalized(x, mean, var, weight, bias, 0.1)
    expected = unscaled * over(weight[None], x) + over(bias[None], x)
    assert close(y, expected, ERRORS[dtype])
    assert close(normalized(x, mean, var, None, None, 0.1), unscaled, ERRORS[dtype])
    one = x[:1]
    y = normalized(one, mean[:1], var[:1], weight, None, 0.1)
    assert close(y, unscaled[:1] * over(weight[None], x), ERRORS[dtype])


@pytest.mark.parametrize("activation", ["silu", "gelu"])  # in place, and not
def test_an_activation(activation: str) -> None:
    x = made((2, 5, 4, 3), "contiguous", torch.float32, 0)
    mean, var = numbers(x, 2)
    given = (x, mean, var.square(), None, None, 0.1)
    expected = activate(normalized(*given), activation, 0.0)
    assert close(normalized(*given, (activation, 0.0)), expected, 1e-6)
    wide = torch.empty(2, 5, 6, 3)
    normalize_to(wide[:, :, 1:5], *given, (activation, 0.0))
    assert close(wide[:, :, 1:5], expected, 1e-6)


@every_case
def test_affine(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    x = made(shape, memory, dtype, 0)
    scale, shift = numbers(x, 2)
    y = affine(x, scale, shift)
    assert y.dtype == dtype
    expected = x.double() * over(scale, x) + over(shift, x)
    assert close(y, expected, ERRORS[dtype])


@every_case
def test_sums(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    x, g = made(shape, memory, dtype, 0), made(shape, "contiguous", dtype, 1)
    mean, invstd = numbers(x, 2)
    along, total = found = sums(g, x, mean, invstd)
    assert found.dtype == mean.dtype
    dims = tuple(range(2, x.dim())) or (-1,)
    normalized = (x.double() - over(mean, x)) * over(invstd, x)
    products, g = g.double() * normalized, g.double()
    if x.dim() == 2:
        products, g = products[..., None], g[..., None]
    limit = min(ERRORS[dtype], 1e-5)
    assert close(along, products.sum(dims), limit)
    assert close(total, g.sum(dims), limit)


@every_case
def test_combination(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    x, g = made(shape, memory, dtype, 0), made(shape, "contiguous", dtype, 1)
    of_x, of_g, shift = numbers(x, 3)
    y = combination(x, g, of_x, of_g, shift)
    assert y.dtype == dtype
    expected = x.double() * over(of_x, x) + g.double() * over(of_g, x) + over(shift, x)
    assert close(y, expected, ERRORS[dtype])


def test_results_have_the_memory_format_of_the_input() -> None:
    x = made((2, 5, 4, 3), "channels last", torch.float32, 0)
    a, b, c = numbers(x, 3)
    for y in (affine(x, a, b), combination(x, x.contiguous(), a, b, c)):
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_a_channel_of_one_value_has_no_variance() -> None:
    x = torch.full((2, 3, 4, 5), 7.0)
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        var, mean = moments(images, torch.float32, 3)
        assert (var == 0).all()
        assert (mean == 7).all()


def test_statistics_may_be_expanded() -> None:
    x, g = (made((1, 4, 3, 2), "contiguous", torch.float64, k) for k in range(2))
    one = torch.full((1, 1), 2.0, dtype=torch.float64)
    for memory in (torch.contiguous_format, torch.channels_last):
        images = x.contiguous(memory_format=memory)
        stats = one.expand(1, 4)
        found = sums(g, images, stats, stats)
        assert torch.equal(found, sums(g, images, stats.clone(), stats.clone()))


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    a, b, c = numbers(x, 3)
    assert affine(x, a, b).shape == shape
    assert combination(x, x, a, b, c).shape == shape
