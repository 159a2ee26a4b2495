"""Norms, pools and resamplings give the same gradients whatever the memory format of
input and cotangent.

PyTorch's own do but for instance norm of one image, whose gradient is wrong for a
channels-last one (2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hetconv
from hetconv.sharding.layout import Layout
from tests.placed import full_gradient, placed
from tests.spawn import on_ranks

CHANNELS = 4
FORMATS = (torch.contiguous_format, torch.channels_last)
SHAPES = [
    (1, CHANNELS, 6, 6),
    (2, CHANNELS, 6, 8),
    (1, CHANNELS, 6, 1),
    (3, CHANNELS, 1, 6),
]


def gains() -> Tensor:
    return torch.arange(1.0, CHANNELS + 1, dtype=torch.float64)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "instance norm": lambda x: F.instance_norm(x),
    "instance norm with gains": lambda x: F.instance_norm(
        x, weight=gains(), bias=gains()
    ),
    "group norm": lambda x: F.group_norm(x, 2, gains(), gains()),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "layer norm of rows": lambda x: F.layer_norm(x, x.shape[-1:]),
    "RMS norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "batch norm in training": lambda x: F.batch_norm(
        x, None, None, gains(), gains(), training=True
    ),
    "batch norm in evaluation": lambda x: F.batch_norm(
        x, gains(), gains(), gains(), gains()
    ),
    "local response norm": lambda x: F.local_response_norm(x, 3),
    "normalize": lambda x: F.normalize(x, dim=1),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "dilated max pool": lambda x: F.max_pool2d(x, 2, 1, 0, 2),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive average pool": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "global average pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "nearest": lambda x: F.interpolate(x, (9, 7)),
    "nearest, twice": lambda x: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "bilinear with corners": lambda x: F.interpolate(
        x, (9, 7), mode="bilinear", align_corners=True
    ),
    "bilinear, smoothed": lambda x: F.interpolate(
        x, (3, 4), mode="bilinear", antialias=True
    ),
    "bicubic": lambda x: F.interpolate(x, (9, 7), mode="bicubic"),
    "area": lambda x: F.interpolate(x, (3, 4), mode="area"),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "replicated edge": lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "zeros around": lambda x: F.pad(x, (1, 2, 2, 1)),
    "PReLU": lambda x: F.prelu(x, gains()),
    "softmax": lambda x: F.softmax(x, 1),
}
WRONG_IN_PYTORCH = {"instance norm", "instance norm with gains"}


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(
        shape,
        dtype=torch.float64,
        generator=torch.Generator(torch.get_default_device()).manual_seed(1),
    )


def plain_gradient(
    name: str, x: Tensor, x_format: torch.memory_format, g_format: torch.memory_format
) -> Tensor:
    leaf = x.clone(memory_format=x_format).requires_grad_()
    y = OPERATORS[name](leaf)
    y.backward(drawn(tuple(y.shape)).contiguous(memory_format=g_format))
    assert leaf.grad is not None
    return leaf.grad


def runs(name: str, shape: tuple[int, ...]) -> bool:
    try:
        OPERATORS[name](drawn(shape))
    except (
        RuntimeError,
        ValueError,
    ):  # a single value in each channel, or a pad as wide as the image
        return False
    return True


@pytest.mark.parametrize("name", OPERATORS)
def test_pytorchs_own(name: str) -> None:
    wrong = False
    for shape in (s for s in SHAPES if runs(name, s)):
        expected = plain_gradient(name, drawn(shape), *FORMATS[:1] * 2)
        for x_format, g_format in product(FORMATS, repeat=2):
            found = plain_gradient(name, drawn(shape), x_format, g_format)
            wrong |= not torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert wrong == (name in WRONG_IN_PYTORCH)


def on_parts(dim: int) -> list[str]:
    """What is wrong of tensors that are cut along a dimension, and of those that are gathered."""
    found = []
    for name, shape in product(OPERATORS, SHAPES):
        if not runs(name, shape):
            continue
        expected = plain_gradient(name, drawn(shape), *FORMATS[:1] * 2)
        n = shape[dim]
        for x_format, g_format in product(FORMATS, repeat=2):
            layout = Layout.sharded(shape, dim, (n - n // 3, n // 3))
            x, local = placed(drawn(shape).contiguous(memory_format=x_format), layout)
            y = hetconv.gather(OPERATORS[name](x))
            y.backward(drawn(tuple(y.shape)).contiguous(memory_format=g_format))
            if local.grad is None and not local.numel():
                local.grad = torch.zeros_like(local)
            gradient = full_gradient(local, layout)
            if gradient is None or not torch.allclose(
                gradient, expected, rtol=1e-9, atol=1e-9
            ):
                found.append(f"{name} of {shape}, {x_format}, cotangent {g_format}")
    return found


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_on_parts(dim: int) -> None:
    assert on_ranks(2, on_parts, dim) == [[], []]
