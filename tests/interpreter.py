"""Where the kernels are tested, and what they are held against.

By default in Triton's interpreter on the CPU (`conftest` turns it on); with
HETCONV_TEST_DEVICE=cuda on the first GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hetconv import kernels
from hetconv.kernels import Tile
from hetconv.kernels.chip import chip_of
from hetconv.kernels.dispatch import precision
from hetconv.kernels.tiles import Pass
from hetconv.sharding.conv_spec import ConvSpec
from tests.spawn import DEVICE

from . import reference

ON_GPU = DEVICE.type == "cuda"
CHIP = chip_of(DEVICE)  # a Hopper stands in for the interpreter
PASSES: tuple[Pass, ...] = ("forward", "input gradient", "weight gradient")
POINTER, TMA = Tile("pointer", 64, 128, 32, 4, 2), Tile("tma", 64, 64, 16, 4, 2)
SAME = ((1, 1), (1, 1))  # the padding that keeps the size under a filter of 3 x 3
BOUNDS = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1e-2}


class Tensors(NamedTuple):
    x: Tensor
    w: Tensor
    bias: Tensor
    g: Tensor


def images(
    C: int,
    K: int,
    size: tuple[int, int],
    R: int,
    S: int,
    *rest: Any,
    dtype: str = "float16",
) -> ConvSpec:
    """A convolution of two images; ``rest``: stride, padding, dilation and groups."""
    usual = (1, 1), ((0, 0), (0, 0)), (1, 1), 1
    given = (*rest, *usual[len(rest) :])
    return ConvSpec(2, C, size, K, (R, S), *given, dtype=dtype)


def tensors(spec: ConvSpec, seed: int = 0) -> Tensors:
    """Random ones in channels_last."""
    random = torch.Generator().manual_seed(seed)
    shapes = (spec.x_shape, spec.w_shape, (spec.K,), spec.y_shape)
    found = [
        torch.randn(s, generator=random).to(DEVICE, getattr(torch, spec.dtype))
        for s in shapes
    ]
    return Tensors(
        *(
            t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
            for t in found
        )
    )


def geometry(spec: ConvSpec) -> Any:
    return spec.stride, spec.padding, spec.dilation, spec.groups


def by_triton(
    what: Pass, spec: ConvSpec, t: Tensors, tile: Tile | None = None
) -> Tensor:
    if what == "forward":
        return kernels.conv2d_forward(
            t.x, t.w, t.bias, *geometry(spec), tile=tile, backend="triton"
        )
    wanted = (what == "input gradient", what == "weight gradient", False)
    found = kernels.conv2d_backward(
        t.g, t.x, t.w, *geometry(spec), wanted, tile=tile, backend="triton"
    )
    gradient = found[wanted.index(True)]
    assert gradient is not None
    return gradient


def truth(what: Pass, spec: ConvSpec, t: Tensors) -> Tensor:
    """By the definition, in float64 on the CPU."""
    x, w, bias, g = (a.detach().double().cpu().requires_grad_() for a in t)
    y = reference.conv2d(x, w, bias, *geometry(spec))
    if what == "forward":
        return y.detach()
    return torch.autograd.grad(
        y, x if what == "input gradient" else w, g, materialize_grads=True
    )[0]


def skip_unless_it_runs(tile: Tile) -> None:
    if tile.kind == "tma" and CHIP.arch < 90:
        pytest.skip("needs Hopper's copy engine")


def assert_close(found: Tensor, expected: Tensor, bound: float) -> None:
    """By the norm of the difference; NaN is never close, and zeros are met exactly."""
    assert found.shape == expected.shape
    error, size = (
        (found.detach().double().cpu() - expected).norm().item(),
        expected.norm().item(),
    )
    assert error <= bound * size, f"{error} of {size}, which is more than {bound}"


def assert_right(
    spec: ConvSpec,
    t: Tensors,
    tile: Tile | None = None,
    passes: tuple[Pass, ...] = PASSES,
) -> None:
    """These passes by Triton are the definition's, up to rounding, in the dtype of their inputs."""
    bound = BOUNDS["tf32" if ON_GPU and precision(spec) == "tf32" else spec.dtype]
    for what in passes:
        found = by_triton(what, spec, t, tile)
        assert found.dtype == t.x.dtype
        assert_close(found, truth(what, spec, t), bound)


@contextmanager
def multiplying_in(name: str) -> Iterator[None]:
    """float32 as "tf32" or "ieee"; in the interpreter both are exact."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = name
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def _multiply_bfloat16() -> None:
    """Triton's interpreter (3.7) multiplies the bit patterns of bfloat16 operands as if
    they were integers.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def widened(a: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return a
        return TensorHandle(
            (a.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


if not ON_GPU:
    _multiply_bfloat16()
