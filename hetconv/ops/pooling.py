"""Pooling on parts."""

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
from hetconv.sharding.layer_rules import OpSharding
from hetconv.sharding.layout import Box

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
    """Cut over samples or channels, as called; cut over space, on the slab that the own
    output reads.
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
    """Cut over samples or channels, as called; over space, what ``over_space`` makes of
    what was read.

    That is given this rank's slab of the input, the dimension of the cut, and its box
    of the output.
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
    """x in a memory format of which PyTorch computes the gradient right.

    On CUDA that of an average pool with padding is wrong for channels-last images (2.11
    to 2.13, PyTorch's issue 188344), and what comes from other ranks is channels-last
    where a plain model has contiguous images.
    """
    averages = (
        isinstance(op, Pool) and op.kind != "max" and any(w.pad_lo for w in op.windows)
    )
    return in_plain_order(x) if averages and x.is_cuda else x


def in_plain_order(x: Tensor) -> Tensor:
    """x with the strides of a new tensor, which `Tensor.contiguous` does not give one
    of a single channel.
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
    """`empty_output` in the dtype that the call gives, which under autocast only torch knows."""
    y = empty_output(shape, x)
    if not torch.is_autocast_enabled(x.device.type):
        return y
    with torch.no_grad():
        whole = x.new_zeros(()).expand(call.inputs[0].shape)
        dtype: torch.dtype = as_called(func, args, kwargs)(whole).dtype
    return y.to(dtype)


def _slab(op: Pool, x: Tensor, dim: int, out: Span, sizes: tuple[int, ...]) -> Tensor:
    """The output span ``out`` from the slab ``x`` that it reads; padding is made
    explicit where a side has any.
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
    """How many numbers each output of a window averages: inputs and, if asked, as much
    padding after as before them.
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
    """Cut over space, each own output along the cut from the inputs that it pools."""
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
    """Over a cut of space each rank's summand is its own sum over the whole count."""
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
