"""Pooling on shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.kernels import is_channels_last
from hetconv.operators.pooling import AdaptivePool, GlobalAveragePool, Pool
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Kwargs, empty_output
from hetconv.sharding.conv_spec import Span, Window
from hetconv.sharding.layout import Box, Layout, ReadRegion

from .as_called import Again, AgainMaker, Runner, ShardedCall
from .conv_geometry import PaddedRows, padded_rows
from .halo_region import halo_region
from .reductions.row_averages import RowAverages

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
    of_shard = _pool_of_shard(c)
    if of_shard is not None:
        x = c.call.inputs[0]
        assert isinstance(x, HetTensor)
        return c.wrap(of_shard(x.local))

    def pool_slab(x: Tensor, dim: int, box: Box) -> Tensor:
        if op.kind == "other":
            y: Tensor = c.on(_differentiable(x, op))
            return y
        return _slab_pool(c, dim)(x)

    return local_outputs(c, pool_slab)


def pool_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what pools other shards in the same way."""
    of_shard, x, output, group = _pool_of_shard(c), c.call.inputs[0], c.output, c.group
    if of_shard is None or not c.args or c.args[0] is not x:
        return None

    def again(args: Args, kwargs: Kwargs) -> HetTensor:
        return HetTensor.made(of_shard(args[0].local), output, group)

    return again


def _pool_of_shard(c: ShardedCall) -> SlabPool | None:
    """Returns what pools a shard, whose ranks may exchange halos; None if more moves."""
    op, x, read = c.call.op, c.call.inputs[0], c.sharding.input_layouts[0]
    assert isinstance(op, Pool)
    if op.kind == "other" or not isinstance(x, HetTensor):
        return None
    dim, src = c.output.inner_dim, x.placement
    if not isinstance(read, ReadRegion) or dim is None or src.inner_dim != dim:
        return None
    if read.boxes == src.boxes and dim >= 2 and c.box.numel:
        return _slab_pool(c, dim)
    out, rank = (c.box.lo[dim], c.box.hi[dim]), c.group.rank
    rows = padded_rows(src, read, dim, op.windows[dim - 2], out, rank)
    return _slab_pool(c, dim, rows) if rows is not None else None


def _slab_pool(c: ShardedCall, dim: int, rows: PaddedRows | None = None) -> SlabPool:
    """Returns the pooling of this rank's slab, or of its shard if ``rows`` are given."""
    op, (x,) = c.call.op, c.call.inputs
    assert isinstance(op, Pool)
    out, sizes = (c.box.lo[dim], c.box.hi[dim]), tuple(x.shape[2:])
    return SlabPool(op, dim, out, sizes, x.is_cuda, c.group, rows)


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


@dataclass(frozen=True, eq=False)
class SlabPool:
    """A pooling of the slab of an image that a rank's outputs read.

    torch pads dimensions that are not split, if both sides have the same padding. Other
    padding is added to the slab, because the two sides of a slab may differ, and an
    average over it is rescaled where it must not count.

    Attributes:
        op: The pooling.
        dim: Dimension that is split.
        out: The rank's outputs along it.
        sizes: Sizes of the whole input in the spatial dimensions.
        is_cuda: Whether the image is on a GPU.
        group: The ranks.
        rows: What is read along the split, if ranks exchange halos.
    """

    op: Pool
    dim: int
    out: Span
    sizes: tuple[int, ...]
    is_cuda: bool
    group: RankGroup
    rows: PaddedRows | None

    def __call__(self, x: Tensor) -> Tensor:
        """Pools the slab; if there are ``rows``, the shard, for which halos are fetched."""
        if self.rows is None:
            return self._pooled(x)
        # torch's kernels on a CPU are many times faster for channels-last images.
        last = torch.channels_last if x.dim() == 4 else None
        y = self._pooled(halo_region(x, self.rows, self.group, self._fill, last))
        return y if x.is_cuda or is_channels_last(x) else y.contiguous()

    def _pooled(self, x: Tensor) -> Tensor:
        op, count = self.op, len(self.sizes)
        if any(self._pads):
            x = F.pad(x, self._pads, value=self._fill)
        kernel, stride = [w.kernel for w in op.windows], [w.stride for w in op.windows]
        if op.kind == "max":
            dilation = [w.dilation for w in op.windows]
            return MAX[count](x, kernel, stride, self._padding, dilation)
        average, counts_padding = AVERAGE[count], op.count_padding
        y = average(x, kernel, stride, self._padding, False, counts_padding)
        return self._rescaled(y)

    @property
    def _fill(self) -> float:
        return -inf if self.op.kind == "max" else 0.0

    @cached_property
    def _padding(self) -> list[int]:
        """The padding in each spatial dimension that torch adds.

        On CUDA it adds none to averages; see `_differentiable`.
        """
        may_pad = self.op.kind == "max" or not self.is_cuda
        return [
            w.pad_lo if may_pad and d != self.dim and w.pad_lo == w.pad_hi else 0
            for d, w in enumerate(self.op.windows, 2)
        ]

    @cached_property
    def _pads(self) -> list[int]:
        """The other padding, as torch's function pad reads it."""
        sides = [(w.pad_lo, w.pad_hi) for w in self.op.windows]
        size, along = self.sizes[self.dim - 2], self.op.windows[self.dim - 2]
        padded = self.rows is not None
        sides[self.dim - 2] = (0, 0) if padded else along.padding(self.out, size)
        rest = zip(sides, self._padding, strict=True)
        return [n - own for side, own in reversed([*rest]) for n in side]

    def _rescaled(self, y: Tensor) -> Tensor:
        """Returns averages of slabs as averages of what counts."""
        exact = torch.float64 if y.dtype == torch.float64 else torch.float32
        scale: Tensor | None = None
        for d, (window, size) in enumerate(
            zip(self.op.windows, self.sizes, strict=True), 2
        ):
            counted = window.pad_lo if self.op.count_padding else 0
            if self._padding[d - 2] or window.pad_hi == counted:
                continue
            span = self.out if d == self.dim else (0, window.out_size(size))
            counts = _counts(window, size, span, self.op.count_padding, y.device)
            each = window.kernel / counts.to(exact)
            each = each.view([-1 if e == d else 1 for e in range(y.dim())])
            scale = each if scale is None else scale * each
        return y if scale is None else (y * scale).to(y.dtype)


@lru_cache(maxsize=256)
def _counts(
    window: Window, size: int, out: Span, padding: bool, device: torch.device
) -> Tensor:
    """Returns, from a cache, how many numbers each output of a window averages.

    With ``padding``, as many padding elements count after the inputs as before them. A
    host that copies them to a GPU waits for it.
    """
    extra = window.pad_lo if padding else 0
    starts = [p * window.stride - window.pad_lo for p in range(*out)]
    counts = [min(a + window.kernel, size + extra) - max(a, -extra) for a in starts]
    return torch.tensor(counts, device=device)


def adaptive_pool(c: ShardedCall) -> HetTensor:
    """Pools adaptively on shards.

    Along a sharded spatial dimension each local output is pooled from the inputs that
    it reads, unless the result is partial.
    """
    op = c.call.op
    assert isinstance(op, AdaptivePool)
    if c.output.kind == "partial":
        return c.wrap(_row_averages(c)(c.local_input()))

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


def adaptive_pool_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what averages the own rows of other shards in the same way."""
    x, output, group = c.call.inputs[0], c.output, c.group
    if output.kind != "partial" or not c.args or c.args[0] is not x:
        return None
    if not isinstance(x, HetTensor) or x.placement != c.sharding.input_layouts[0]:
        return None
    averages = _row_averages(c)

    def again(args: Args, kwargs: Kwargs) -> HetTensor:
        return HetTensor.made(averages(args[0].local), output, group)

    return again


def _row_averages(c: ShardedCall) -> RowAverages:
    op, (read,), x = c.call.op, c.sharding.input_layouts, c.call.inputs[0]
    assert isinstance(op, AdaptivePool)
    assert isinstance(read, Layout)
    dim, box = read.inner_dim, read.boxes[c.group.rank]
    assert dim is not None
    shape, rows = c.box.shape, (box.lo[dim], box.hi[dim])
    pooling = ADAPTIVE[op.kind][len(shape) - 2]
    return RowAverages(op, pooling, dim, shape, rows, x.shape[dim])


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
AGAIN: dict[type[Any], AgainMaker] = {
    AdaptivePool: adaptive_pool_again,
    Pool: pool_again,
}
