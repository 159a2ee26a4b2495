"""Triton's passes of norms against plain formulas in float64: any layout, any number of
dimensions; few launches, and the same bits every time.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetconv.kernels import norms
from hetconv.kernels.epilogue import ACTIVATIONS, IDENTITY, activate
from hetconv.kernels.norms import triton_passes
from hetconv.kernels.norms.layouts import ImageLayout, as_rows_and_columns
from hetconv.kernels.triton.norms import statistics, tiles
from hetconv.kernels.triton.norms.statistics import moments_launches, sums_launches
from tests.interpreter import BOUNDS, DEVICE, ON_GPU, assert_close
from tests.kernels.triton.norm_cases import (
    EPS,
    EXACT,
    MEMORIES,
    SLOPE,
    Case,
    cases,
    epilogue_of,
    finished,
    image,
    in_float64,
    numbers,
    on_image,
)

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
EXAMPLES = 5 if ON_GPU else 20


@given(case=cases())
@settings(max_examples=EXAMPLES)
def test_moments(case: Case) -> None:
    x = case.image(0, 3.0)
    N, x64 = case.shape[0], x.double().cpu()
    for groups in {1, case.groups, case.shape[1]}:
        flat = x64.reshape(N, groups, -1)
        expected = torch.stack((flat.var(2, correction=0), flat.mean(2)))
        assert_close(triton_passes.moments(x, groups), expected, EXACT)
    flat = x64.transpose(0, 1).flatten(1)
    expected = torch.stack((flat.var(1, correction=0), flat.mean(1)))[:, None]
    found = triton_passes.moments(x, case.shape[1], of_all_samples=True)
    assert_close(found, expected, EXACT)


@pytest.mark.parametrize("memory", MEMORIES[:2])
@pytest.mark.parametrize(("dtype", "centre"), [("float32", 1e4), ("float16", 500.0)])
def test_variances_far_from_zero(dtype: str, centre: float, memory: str) -> None:
    """A mean of squares less the square of the mean would have no digit left."""
    x = image((2, 4, 40, 41), memory, dtype, 0, centre)
    flat = x.double().cpu().reshape(2, 4, -1)
    for groups in (1, 4):
        expected = flat.reshape(2, groups, -1).var(2, correction=0)
        assert_close(triton_passes.moments(x, groups)[0], expected, 1e-4)
    found = triton_passes.moments(x, 4, of_all_samples=True)[0, 0]
    expected = flat.transpose(0, 1).flatten(1).var(1, correction=0)
    assert_close(found, expected, 1e-4)


def test_a_first_pixel_far_from_the_others() -> None:
    x = image((1, 2, 30, 31), "contiguous", "float32", 0, 1e4)
    x[..., 0, 0] = 0
    expected = x.double().cpu().reshape(1, 2, -1).var(2, correction=0)
    assert_close(triton_passes.moments(x, 2)[0], expected, EXACT)


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("memory", MEMORIES[:2])
def test_parts_of_large_images(
    memory: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether each is one program's or several's, and each of these has several blocks."""
    monkeypatch.setattr(tiles, "MIN_PROGRAMS", programs)
    monkeypatch.setattr(statistics, "REDUCED_ELEMENTS", 512)
    monkeypatch.setattr(tiles, "MAX_BLOCK_P", 256)
    x, g = (image((2, 6, 37, 29), memory, "float32", seed, 2.0) for seed in (0, 1))
    (layout,) = as_rows_and_columns([ImageLayout.of(x)], False) or ()
    flat = x.double().cpu().reshape(2, 3, -1)
    found = torch.empty((2, 2, 3), device=DEVICE)
    moments_launches(layout, 3, False).run(x=x, moments=found)
    assert_close(found[0], flat.var(2, correction=0), EXACT)
    assert_close(found[1], flat.mean(2), EXACT)
    mean, invstd = (t.contiguous() for t in numbers((2, 6), 2))
    strides = {"mean_stride": 6, "scale_stride": 0, "shift_stride": 0}
    given = {"g": g, "x": x, "mean": mean, "invstd": invstd}
    found = torch.empty((2, 2, 6), device=DEVICE)
    sums_launches(layout, layout, strides, False, IDENTITY.spec).run(
        **given, sums=found
    )
    assert_close(found, sums64(g, x, mean, invstd), EXACT)


with_epilogues = given(
    case=cases(),
    activation=st.sampled_from(["", *ACTIVATIONS]),
    with_residual=st.booleans(),
    shared=st.booleans(),
)


@with_epilogues
@settings(max_examples=EXAMPLES)
def test_normalized(
    case: Case, activation: str, with_residual: bool, shared: bool
) -> None:
    x = case.image(0, 1.0)
    mean, var = numbers((1 if shared else case.shape[0], case.shape[1]), 2)
    epilogue = epilogue_of(case, activation, with_residual)
    y = triton_passes.normalized(x, mean, var, EPS, epilogue)
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=norms.memory_format(x))
    z = (x.double().cpu() - on_image(mean, x)) / (on_image(var, x) + EPS).sqrt()
    expected = finished(z, in_float64(epilogue))
    assert_close(y, expected, BOUNDS[case.dtype])
    assert y.equal(triton_passes.normalized(x, mean, var, EPS, epilogue))


def sums64(d: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Sums (2, N, C) of d times the normalized x, and of d, in float64 on the CPU."""
    d64, x64 = d.double().cpu(), x.double().cpu()
    normalized = (x64 - on_image(mean, x)) * on_image(invstd, x)
    each = torch.stack((d64 * normalized, d64))
    return each.flatten(3).sum(3) if x.dim() > 2 else each


@with_epilogues
@settings(max_examples=EXAMPLES)
def test_gradients(
    case: Case, activation: str, with_residual: bool, shared: bool
) -> None:
    """Through an activation, whose input is computed again; of each sample, or of all."""
    x, g = case.image(0, 1.0), case.image(1)
    rows = (1 if shared else case.shape[0], case.shape[1])
    mean, invstd, *factors = numbers(rows, 5)
    epilogue = epilogue_of(case, activation, with_residual)
    z = (x.double().cpu() - on_image(mean, x)) * on_image(invstd, x)
    z = finished(z, in_float64(epilogue)._replace(activation=""))
    y = activate(z.requires_grad_(), activation, SLOPE)
    (d,) = torch.autograd.grad(y, z, g.double().cpu())
    expected = sums64(d, x, mean, invstd)
    expected = expected.sum(1, keepdim=True) if shared else expected
    found = triton_passes.sums(g, x, mean, invstd, epilogue, of_all_samples=shared)
    assert_close(found, expected, 1e-4)  # they may nearly cancel
    first, second, third = factors
    arguments = (x, g, (first, second, third), (mean, invstd), epilogue)
    gx, dr = triton_passes.combination(*arguments)
    assert gx.dtype == x.dtype
    assert gx.is_contiguous(memory_format=norms.memory_format(x))
    expected = x.double().cpu() * on_image(first, x) + d * on_image(second, x)
    assert_close(gx, expected + on_image(third, x), BOUNDS[case.dtype])
    assert (dr is not None) == (with_residual and activation != "")
    if dr is not None:
        assert_close(dr, d, BOUNDS[case.dtype])


def group_norm(x: Tensor, g: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Result and gradient of a group norm by the public passes."""
    channels = x.shape[1] // groups
    var, mean = (
        t.repeat_interleave(channels, 1)
        for t in norms.moments(x, torch.float32, groups)
    )
    y = norms.normalized(x, mean, var, None, None, EPS)
    invstd = (var + EPS).rsqrt()
    count = channels * prod(x.shape[2:])
    sums = norms.sums(g, x, mean, invstd).unflatten(2, (groups, channels)).sum(3)
    along, shift = sums.repeat_interleave(channels, 2) * (-invstd / count)
    along = along * invstd
    return y, norms.combination(x, g, along, invstd, shift - along * mean)


def batch_norm(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Result and gradient of a batch norm by the public passes."""
    var, mean = norms.moments_of_channels(x, torch.float32)
    y = norms.normalized(x, mean[None], var[None], None, None, EPS)
    invstd = (var + EPS).rsqrt()
    sums = norms.sums_of_channels(g, x, mean, invstd)
    along, shift = sums * (-invstd * x.shape[1] / x.numel())
    along = along * invstd
    factors = (along, invstd, shift - along * mean)
    return y, norms.combination(x, g, *(t[None] for t in factors))


NORMS: dict[str, tuple[Any, Any]] = {
    "group norm": (
        lambda x, g: group_norm(x, g, 2),
        lambda x: torch.group_norm(x, 2, eps=EPS),
    ),
    "instance norm": (
        lambda x, g: group_norm(x, g, 6),
        lambda x: torch.group_norm(x, 6, eps=EPS),
    ),
    "batch norm": (
        batch_norm,
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True, eps=EPS),
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.usefixtures("by_triton")
def test_a_norm_is_at_most_three_launches_each_way(
    name: str, memory: str, launched: list[str]
) -> None:
    """It is torch's, and has the same bits every time."""
    ours, torchs = NORMS[name]
    x, g = (image((2, 6, 37, 29), memory, "float32", seed, 1.0) for seed in (0, 1))
    y, gx = ours(x, g)
    backward = launched.index("partial_sums")
    assert backward <= 3
    assert len(launched) - backward <= 3
    x64 = x.detach().double().cpu().requires_grad_()
    expected = torchs(x64)
    assert_close(y, expected.detach(), EXACT)
    (gradient,) = torch.autograd.grad(expected, x64, g.double().cpu())
    assert_close(gx, gradient, EXACT)
    assert all(a.equal(b) for a, b in zip(ours(x, g), (y, gx), strict=True))


@pytest.mark.parametrize(
    ("shape", "memory"),
    [
        ((2, 3, 5), "contiguous"),
        *product([(2, 3, 5, 4), (2, 3, 5, 4, 3)], MEMORIES[:2]),
    ],
)
@pytest.mark.usefixtures("by_triton")
def test_a_result_fills_its_slab_and_nothing_else(
    shape: tuple[int, ...], memory: str, launched: list[str]
) -> None:
    x = image(shape, memory, "float32", 0)
    mean, var = numbers(shape[:2], 2)
    expected = norms.normalized(x, mean, var, None, None, EPS)
    for dim in range(2, len(shape)):
        sizes = [n + 3 * (i == dim) for i, n in enumerate(shape)]
        whole = torch.full(sizes, torch.nan, device=DEVICE)
        whole = whole.contiguous(memory_format=norms.memory_format(x))
        launched.clear()
        slab = whole.narrow(dim, 2, shape[dim])
        norms.normalize_to(slab, x, mean, var, None, None, EPS)
        assert launched == ["normalize"]
        assert slab.equal(expected)
        assert whole.isnan().sum() == whole.numel() - x.numel()
