"""Pooling on shards."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.operators.pooling import AdaptivePool, GlobalAveragePool, Pool
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import empty_output
from hetconv.sharding.conv_spec import Span, Window
from hetconv.sharding.layout import Box

from .as_called import Runner, ShardedCall

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
"""Torch's functions, by kind and by the number of spatial dimensions."""


def pool(c: ShardedCall) -> HetTensor:
    """Pools the local shard.

    If a spatial dimension is sharded, the local outputs are computed from the slab of
    the input that they read.
    """
    op = c.call.op
    assert isinstance(op, Pool)

    def pool_slab(x: Tensor, dim: int, box: Box) -> Tensor:
        if op.kind == "other":
            y: Tensor = c.on(_differentiable(x, op))
            return y
        sizes = tuple(c.call.inputs[0].shape[2:])
        return _slab(op, x, dim, (box.lo[dim], box.hi[dim]), sizes)

    return local_outputs(c, pool_slab)


def local_outputs(
    c: ShardedCall, on_slab: Callable[[Tensor, int, Box], Tensor]
) -> HetTensor:
    """Computes the local outputs of an operator with spatial windows.

    Args:
        c: The call. If samples or channels are sharded, it runs on the shard as it is.
        on_slab: Computes the outputs if a spatial dimension is sharded, from this
            rank's slab of the input, the sharded dimension and the box of the outputs.
    """
    dim = c.output.inner_dim
    assert dim is not None
    x = c.local_input()
    if not c.box.numel:
        return c.wrap(empty_shard(x, c))
    if dim < 2:
        return c.wrap(c.on(_differentiable(x, c.call.op)))
    return c.wrap(on_slab(x, dim, c.box))


def _differentiable(x: Tensor, op: object) -> Tensor:
    """Returns ``x`` in a memory format for which PyTorch's gradient is right.

    On CUDA the gradient of an average pool with padding is wrong for channels-last
    images (PyTorch 2.11 to 2.13, issue 188344), and images from other ranks are
    channels-last where those of a plain model are contiguous.
    """
    if isinstance(op, Pool) and op.kind != "max" and x.is_cuda:
        return in_plain_order(x) if any(w.pad_lo for w in op.windows) else x
    return x


def in_plain_order(x: Tensor) -> Tensor:
    """Returns ``x`` with the strides of a new contiguous tensor.

    `Tensor.contiguous` leaves the strides of a tensor with one channel as they are.
    """
    if x.stride() == torch.empty(x.shape, device="meta").stride():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def empty_shard(x: Tensor, c: ShardedCall) -> Tensor:
    """Returns an empty shard of the result, in the dtype that the call gives.

    Under autocast only torch knows this dtype, so that the call is run on zeros.
    """
    y = empty_output(c.box.shape, x)
    if not torch.is_autocast_enabled(x.device.type):
        return y
    with torch.no_grad():
        dtype: torch.dtype = c.on(x.new_zeros(()).expand(c.call.inputs[0].shape)).dtype
    return y.to(dtype)


def _slab(op: Pool, x: Tensor, dim: int, out: Span, sizes: tuple[int, ...]) -> Tensor:
    """Pools the slab ``x`` to the output span ``out`` along ``dim``.

    Padding is added explicitly, because the two sides of a slab may differ. An average
    over it is rescaled where the padding must not count.
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
    exact = torch.float64 if y.dtype == torch.float64 else torch.float32
    scale = torch.ones((), dtype=exact, device=x.device)
    for d, (window, size) in enumerate(zip(op.windows, sizes, strict=True), 2):
        span = out if d == dim else (0, window.out_size(size))
        counts = _counts(window, size, span, op.count_padding, x.device)
        each = window.kernel / counts.to(exact)
        scale = scale * each.view([-1 if e == d else 1 for e in range(x.dim())])
    return (y * scale).to(y.dtype)


def _counts(
    window: Window, size: int, out: Span, padding: bool, device: torch.device
) -> Tensor:
    """Returns how many numbers each output of a window averages.

    With ``padding``, as many padding elements count after the inputs as before them.
    """
    extra = window.pad_lo if padding else 0
    starts = [p * window.stride - window.pad_lo for p in range(*out)]
    counts = [min(a + window.kernel, size + extra) - max(a, -extra) for a in starts]
    return torch.tensor(counts, device=device)


def adaptive_pool(c: ShardedCall) -> HetTensor:
    """Pools adaptively on shards.

    Along a sharded spatial dimension each local output is pooled from the inputs that
    it reads.
    """
    op = c.call.op
    assert isinstance(op, AdaptivePool)

    def pool_slab(x: Tensor, dim: int, box: Box) -> Tensor:
        first = c.sharding.input_layouts[0].boxes[c.group.rank].lo[dim]
        n, size = c.call.inputs[0].shape[dim], list(box.shape[2:])
        size[dim - 2] = 1
        pooling = ADAPTIVE[op.kind][len(size)]
        reads = (op.reads(dim, n, (i, i + 1)) for i in range(box.lo[dim], box.hi[dim]))
        outputs = [
            pooling(x.narrow(dim, lo - first, hi - lo), size) for lo, hi in reads
        ]
        return torch.cat(outputs, dim)

    return local_outputs(c, pool_slab)


def global_average_pool(c: ShardedCall) -> HetTensor:
    """Averages over all of space.

    If space is sharded, the result is partial: each rank's sum over the global count.
    """
    x = c.local_input()
    if c.output.kind == "partial":
        count = prod(c.call.inputs[0].shape[2:])
        return c.wrap(x.sum(tuple(range(2, x.dim())), keepdim=True) / count)
    return c.wrap(c.on(x) if x.numel() else empty_shard(x, c))


RUN: dict[type[Any], Runner] = {
    AdaptivePool: adaptive_pool,
    GlobalAveragePool: global_average_pool,
    Pool: pool,
}
