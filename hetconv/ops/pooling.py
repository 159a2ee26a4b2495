"""Pooling on shards."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.operators.base import Call
from hetconv.operators.pooling import AdaptivePool, GlobalAveragePool, Pool
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import (
    Args,
    Func,
    Kwargs,
    Runner,
    as_called,
    empty_output,
    to_layout,
)
from hetconv.sharding.conv_spec import Span, Window
from hetconv.sharding.layout import Box
from hetconv.sharding.rule import OpSharding

MAX: dict[int, Callable[..., Tensor]] = {
    1: F.max_pool1d,
    2: F.max_pool2d,
    3: F.max_pool3d,
}
AVERAGE: dict[int, Callable[..., Tensor]] = {
    1: F.avg_pool1d,
    2: F.avg_pool2d,
    3: F.avg_pool3d,
}
ADAPTIVE: dict[str, dict[int, Callable[..., Tensor]]] = {
    "max": {
        1: F.adaptive_max_pool1d,
        2: F.adaptive_max_pool2d,
        3: F.adaptive_max_pool3d,
    },
    "average": {
        1: F.adaptive_avg_pool1d,
        2: F.adaptive_avg_pool2d,
        3: F.adaptive_avg_pool3d,
    },
}
"""By the number of spatial dimensions."""


def pool(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs a pooling.

    Where samples or channels are sharded, it runs as called; where space is, on the rows
    that the rank's outputs read.
    """
    op = call.op
    assert isinstance(op, Pool)

    def pooled(x: Tensor, dim: int, box: Box) -> Tensor:
        if op.kind == "other":
            y: Tensor = as_called(func, args, kwargs)(_differentiable(x, op))
            return y
        return _slab(
            op, x, dim, (box.lo[dim], box.hi[dim]), tuple(call.inputs[0].shape[2:])
        )

    return own_outputs(call, sharding, group, func, args, kwargs, pooled)


def own_outputs(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
    over_space: Callable[[Tensor, int, Box], Tensor],
) -> HetTensor:
    """Computes a rank's outputs of a pooling.

    Args:
        call: the call.
        sharding: how it is sharded.
        group: the ranks.
        func: torch's function.
        args: its arguments.
        kwargs: its keyword arguments.
        over_space: computes the outputs where space is sharded, from the rows that they
            read, the sharded dimension, and the box of the outputs.
    """
    layout = sharding.output
    assert layout.inner_dim is not None
    x, box = (
        to_layout(call.inputs[0], sharding.input_layouts[0], group),
        layout.boxes[group.rank],
    )
    if not box.numel:
        y = empty_part(x, call, box.shape, func, args, kwargs)
    elif layout.inner_dim < 2:
        y = as_called(func, args, kwargs)(_differentiable(x, call.op))
    else:
        y = over_space(x, layout.inner_dim, box)
    return HetTensor.wrap(y, layout, group)


def _differentiable(x: Tensor, op: object) -> Tensor:
    """Returns x in a memory format for which PyTorch's gradient is right.

    On CUDA the gradient of an average pool with padding is wrong for channels-last images
    (PyTorch 2.11 to 2.13, issue 188344). What other ranks sent is channels-last where a plain
    model has contiguous images.
    """
    averages = (
        isinstance(op, Pool) and op.kind != "max" and any(w.pad_lo for w in op.windows)
    )
    return in_plain_order(x) if averages and x.is_cuda else x


def in_plain_order(x: Tensor) -> Tensor:
    """Returns x with the strides of a new tensor.

    `Tensor.contiguous` does not change those of an image with a single channel.
    """
    strides = torch.empty(x.shape, device="meta").stride()
    return (
        x if x.stride() == strides else x.clone(memory_format=torch.contiguous_format)
    )


def empty_part(
    x: Tensor,
    call: Call,
    shape: tuple[int, ...],
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> Tensor:
    """Returns `empty_output` in the dtype of the call, which under autocast torch decides."""
    y = empty_output(shape, x)
    if not torch.is_autocast_enabled(x.device.type):
        return y
    with torch.no_grad():
        whole = x.new_zeros(()).expand(call.inputs[0].shape)
        dtype: torch.dtype = as_called(func, args, kwargs)(whole).dtype
    return y.to(dtype)


def _slab(op: Pool, x: Tensor, dim: int, out: Span, sizes: tuple[int, ...]) -> Tensor:
    """Computes a span of outputs from the rows that they read.

    Padding is explicit where any side has some.
    """
    sides = [(w.pad_lo, w.pad_hi) for w in op.windows]
    sides[dim - 2] = op.windows[dim - 2].padding(out, sizes[dim - 2])
    kernel, stride = [w.kernel for w in op.windows], [w.stride for w in op.windows]
    pads = [n for side in reversed(sides) for n in side]
    if op.kind == "max":
        x = F.pad(x, pads, value=float("-inf")) if any(pads) else x
        return MAX[len(sizes)](x, kernel, stride, 0, [w.dilation for w in op.windows])
    x, average = F.pad(x, pads) if any(pads) else x, AVERAGE[len(sizes)]
    if all(w.pad_hi == (w.pad_lo if op.count_padding else 0) for w in op.windows):
        return average(x, kernel, stride)
    y = average(x, kernel, stride)
    scale = torch.ones(
        (),
        dtype=torch.float64 if y.dtype == torch.float64 else torch.float32,
        device=x.device,
    )
    for d, (window, size) in enumerate(zip(op.windows, sizes, strict=True), 2):
        span = out if d == dim else (0, window.out_size(size))
        each = window.kernel / _counts(
            window, size, span, op.count_padding, x.device
        ).to(scale.dtype)
        scale = scale * each.view([-1 if e == d else 1 for e in range(x.dim())])
    return (y * scale).to(y.dtype)


def _counts(
    window: Window, size: int, out: Span, padding: bool, device: torch.device
) -> Tensor:
    """Returns how many numbers each output averages.

    These are inputs and, if asked for, as much padding after as before them.
    """
    extra = window.pad_lo if padding else 0
    starts = [p * window.stride - window.pad_lo for p in range(*out)]
    counts = [min(a + window.kernel, size + extra) - max(a, -extra) for a in starts]
    return torch.tensor(counts, device=device)


def adaptive_pool(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs adaptive pooling; where space is sharded, each output from its own inputs."""
    op = call.op
    assert isinstance(op, AdaptivePool)

    def pooled(x: Tensor, dim: int, box: Box) -> Tensor:
        first, n, size = (
            sharding.input_layouts[0].boxes[group.rank].lo[dim],
            call.inputs[0].shape[dim],
            list(box.shape[2:]),
        )
        size[dim - 2] = 1
        pooling = ADAPTIVE[op.kind][len(size)]
        reads = (op.reads(dim, n, (i, i + 1)) for i in range(box.lo[dim], box.hi[dim]))
        return torch.cat(
            [pooling(x.narrow(dim, lo - first, hi - lo), size) for lo, hi in reads], dim
        )

    return own_outputs(call, sharding, group, func, args, kwargs, pooled)


def global_average_pool(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs average pooling to one pixel.

    Where space is sharded, each rank's summand is its sum over the count of all pixels.
    """
    op = call.op
    assert isinstance(op, GlobalAveragePool)
    x = to_layout(call.inputs[0], sharding.input_layouts[0], group)
    shape = sharding.output.boxes[group.rank].shape
    if sharding.output.kind == "partial":
        y = x.sum(tuple(range(2, x.dim())), keepdim=True) / prod(
            call.inputs[0].shape[2:]
        )
    elif x.numel():
        y = as_called(func, args, kwargs)(x)
    else:
        y = empty_part(x, call, shape, func, args, kwargs)
    return HetTensor.wrap(y, sharding.output, group)


RUN: dict[type[Any], Runner] = {
    AdaptivePool: adaptive_pool,
    GlobalAveragePool: global_average_pool,
    Pool: pool,
}
