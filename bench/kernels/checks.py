"""One pass of a case on tensors: who computes it, and whether the result is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.cases import TORCH, Case, Dtype
from hetconv import kernels
from hetconv.kernels import tiles
from hetconv.kernels.chip import Chip, chip_of
from hetconv.kernels.launch import StridedLayout
from hetconv.kernels.tiles import GemmShape, Pass, Tile
from hetconv.kernels.triton import dgrad, fprop, wgrad
from hetconv.kernels.triton.backend import is_usable

EXACT_FLOPS = 3e10  # of a reference in float64
WANTED: dict[Pass, tuple[bool, bool, bool]] = {
    "input gradient": (True, False, False),
    "weight gradient": (False, True, False),
}


class Error(NamedTuple):
    """Of a result against another: ‖found - expected‖ / ‖expected‖, and the largest
    difference over the RMS.
    """

    norm: float
    worst: float

    def within(self, limit: Error) -> bool:
        return self.norm <= limit.norm and self.worst <= limit.worst  # NaN is not


# Of inputs as they are, rounding of the result alone is left, but for tf32, which
# rounds (or cuts) inputs as well.
LIMITS: dict[Dtype, Error] = {
    "bf16": Error(4e-3, 0.05),
    "fp16": Error(1e-3, 0.01),
    "tf32": Error(2e-3, 0.02),
}


class Tensors(NamedTuple):
    x: Tensor
    w: Tensor
    g: Tensor

    def first(self, samples: int) -> Tensors:
        return Tensors(self.x[:samples], self.w, self.g[:samples])


def drawn(
    case: Case, what: Pass, device: torch.device, like: Tensors | None = None
) -> Tensors:
    """Random inputs, scaled so that results are of size 1. What a pass does not read is
    shared with ``like``.
    """
    spec, dtype = case.spec, getattr(torch, TORCH[case.dtype])

    def image(shape: tuple[int, ...], scale: float) -> Tensor:
        n, c, h, w = shape
        return (
            torch.randn(n, h, w, c, device=device, dtype=dtype)
            .mul_(scale)
            .permute(0, 3, 1, 2)
        )

    def unread(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(
            shape, device=device, dtype=dtype, memory_format=torch.channels_last
        )

    taps, (N, K, P, Q) = spec.R * spec.S, spec.y_shape
    if what == "weight gradient":
        w = like.w if like else unread(spec.w_shape)
        return Tensors(
            image(spec.x_shape, 1), w, image(spec.y_shape, (N * P * Q) ** -0.5)
        )
    if what == "input gradient":
        x = like.x if like else unread(spec.x_shape)
        return Tensors(
            x, image(spec.w_shape, (K * taps) ** -0.5), image(spec.y_shape, 1)
        )
    g = like.g if like else image((1, 1, 1, 1), 1).expand(spec.y_shape)
    return Tensors(
        image(spec.x_shape, 1), image(spec.w_shape, (spec.C * taps) ** -0.5), g
    )


def read_bytes(case: Case, what: Pass) -> int:
    """Bytes of the two operands."""
    s = case.spec
    sizes = {
        "forward": (s.x_shape, s.w_shape),
        "input gradient": (s.y_shape, s.w_shape),
    }
    return s.itemsize * sum(
        a * b * c * d for a, b, c, d in sizes.get(what, (s.x_shape, s.y_shape))
    )


def by_triton(
    case: Case,
    what: Pass,
    t: Tensors,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    s = case.spec
    geometry = (s.stride, s.padding, s.dilation, s.groups)
    if what == "forward":
        return kernels.conv2d_forward(
            t.x, t.w, None, *geometry, out=out, tile=tile, backend="triton"
        )
    found = kernels.conv2d_backward(
        t.g, t.x, t.w, *geometry, WANTED[what], tile=tile, backend="triton"
    )
    y = found[0] if what == "input gradient" else found[1]
    assert y is not None
    return y


def by_aten(case: Case, what: Pass, t: Tensors, out: Tensor | None = None) -> Tensor:
    """cuDNN's on CUDA. It cannot write into a slice: with ``out`` the result is copied there."""
    stride, pad, dilation = ((v, v) for v in (case.stride, case.padding, case.dilation))
    if what == "forward":
        y = F.conv2d(t.x, t.w, None, stride, pad, dilation)
        return y if out is None else out.copy_(y)
    found: Any = torch.ops.aten.convolution_backward(
        t.g, t.x, t.w, None, stride, pad, dilation, False, [0, 0], 1, WANTED[what]
    )
    y = found[0] if what == "input gradient" else found[1]
    assert isinstance(y, Tensor)
    return y


def errors(
    case: Case, what: Pass, t: Tensors, other: Tensor, tile: Tile | None = None
) -> dict[str, Error]:
    """Of Triton's result, against float64 on the first samples and against ``other``
    (`by_aten`'s) on all.
    """
    samples = affordable(case)
    few, fewer = replace(case, N=samples), t.first(samples)
    with poisoned():
        found = by_triton(case, what, t, tile)
        if (
            what == "weight gradient"
        ):  # it sums over samples, so a few are run again, by the same program
            some = by_triton(
                few, what, fewer, tile or default_tile(case, what, t.x.device)
            )
        else:
            some = found[:samples]
    return {
        "float64": error(some, exact(few, what, fewer)),
        "cudnn": error(found, other),
    }


def affordable(case: Case) -> int:
    """Samples whose result in float64 does not take too long."""
    return max(min(case.N, int(EXACT_FLOPS * case.N / case.spec.flops)), 1)


def is_wrong(case: Case, found: dict[str, Error]) -> bool:
    limit = LIMITS[case.dtype]
    both = Error(2 * limit.norm, 2 * limit.worst)  # the other one rounds as well
    return not (found["float64"].within(limit) and found["cudnn"].within(both))


def error(found: Tensor, expected: Tensor) -> Error:
    """In float64, sample by sample so that large tensors need little more memory."""
    zero = torch.zeros((), dtype=torch.float64, device=found.device)
    square, total, worst = zero.clone(), zero.clone(), zero.clone()
    step = max((1 << 26) // max(found[0].numel(), 1), 1)
    for a, b in zip(found.split(step), expected.split(step), strict=True):
        exact = b.double()
        difference = a.double() - exact
        square += difference.square().sum()
        total += exact.square().sum()
        worst = torch.maximum(worst, difference.abs().max())
    norm, rms = total.sqrt(), (total / found.numel()).sqrt()
    return Error(float(square.sqrt() / norm), float(worst / rms))


def exact(case: Case, what: Pass, t: Tensors) -> Tensor:
    """The truth, of the same inputs in float64."""
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        return by_aten(case, what, Tensors(*(v.double().contiguous() for v in t)))
    finally:
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, results and workspaces alike: what is read or returned
    unwritten shows.
    """
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def slots(case: Case, device: torch.device, count: int) -> Callable[[int], Tensor]:
    """Where slice results go: the last channels of the whole layer's output, one of
    ``count`` outputs.
    """
    N, K, P, Q = case.spec.y_shape
    dtype = getattr(torch, TORCH[case.dtype])
    whole = [
        torch.empty(N, P, Q, case.filters, device=device, dtype=dtype)
        for _ in range(count)
    ]
    return lambda i: whole[i].permute(0, 3, 1, 2)[:, case.filters - K :]


def gemm_shapes(case: Case, what: Pass) -> list[GemmShape]:
    """The matrix products of a pass; an input gradient has one for each phase of the stride."""
    s = case.spec
    precision = "tf32" if case.dtype == "tf32" else "ieee"
    shapes = (s.x_shape, s.w_shape, s.y_shape)
    x, w, y = (StridedLayout.packed(shape, s.dtype) for shape in shapes)
    if what == "forward":
        return [fprop.forward(s, x, w, y, precision).shape]
    if what == "weight gradient":
        return [wgrad.weight_gradient(s, x, w, y, precision).shape]
    found = [p.gemm for p in dgrad.phases(s, y, w, x, precision)]
    return [c.shape for c in found if c is not None]


def default_tile(case: Case, what: Pass, device: torch.device) -> Tile:
    """What is taken where no tile is given; of several phases' the first."""
    return tiles.default_tile(gemm_shapes(case, what)[0], chip_of(device))


def tiles_of(case: Case, what: Pass, chip: Chip) -> list[Tile]:
    """Every tile of the space that computes all products of a pass, with its splits."""
    shapes = gemm_shapes(case, what)
    found: dict[Tile, None] = {}
    for shape in shapes:
        space = list(tiles.search_space(shape, chip))
        found |= dict.fromkeys(tiles.with_splits(space, shape, chip))
    return [t for t in found if all(is_usable(t, shape, chip) for shape in shapes)]
