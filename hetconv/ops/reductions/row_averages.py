"""Adaptive averages of images that are cut by rows, as sums of the ranks' own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.kernels import CHANNELS_LAST
from hetconv.operators.pooling import AdaptivePool
from hetconv.runtime.inputs import empty_output
from hetconv.sharding.conv_spec import Span


@dataclass(frozen=True, eq=False)
class RowAverages:
    """What the rows of a shard add to the outputs of an adaptive average pooling.

    Attributes:
        op: The pooling.
        pooling: torch's function of an image and the spatial shape of the result.
        dim: Dimension that is split.
        shape: Shape of the outputs.
        rows: The rows of the shard.
        size: Number of rows of the whole input.
    """

    op: AdaptivePool
    pooling: Callable[..., Tensor]
    dim: int
    shape: tuple[int, ...]
    rows: Span
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        """Adds up rows by their weights, and averages along the other dimensions.

        Numbers of 16 bits are averaged first: a small sum of few of them is exact in 32.
        """
        if not x.numel():
            # The data type depends on autocast, as torch alone knows.
            like = self.pooling(x.new_zeros((1,) * x.dim()), 1)
            return empty_output(self.shape, x).to(like.dtype)
        if x.dtype.itemsize >= 4:
            return self._others_averaged(self._rows_added(x))
        y = self._others_averaged(x)
        return self._rows_added(y.float()).to(y.dtype)

    def _others_averaged(self, x: Tensor) -> Tensor:
        """Returns the averages along all spatial dimensions but that of rows."""
        out = [*self.shape[2:]]
        out[self.dim - 2] = x.shape[self.dim]
        return self.pooling(x, out)

    def _rows_added(self, x: Tensor) -> Tensor:
        """Returns weighted sums of rows, as a product of matrices."""
        last = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
        is_last = not x.is_contiguous() and x.is_contiguous(memory_format=last)
        dim, weights = self.dim - is_last, self._weights.to(x.device, x.dtype)
        x = x.movedim(1, -1) if is_last else x
        with torch.autocast(x.device.type, enabled=False):
            if dim == x.dim() - 1:
                y = F.linear(x, weights)
            else:
                inner = x.shape[dim + 1 :]
                y = torch.matmul(weights, x.flatten(dim + 1)).unflatten(-1, inner)
        return y.movedim(-1, 1) if is_last else y

    @cached_property
    def _weights(self) -> Tensor:
        """(outputs, own rows): 1 over the size of an output's window in each of its rows."""
        count, (first, last) = self.shape[self.dim], self.rows
        weights = torch.zeros(count, last - first, dtype=torch.float64, device="cpu")
        for i in range(count):
            lo, hi = self.op.reads(self.dim, self.size, (i, i + 1))
            weights[i, max(lo - first, 0) : max(hi - first, 0)] = 1 / (hi - lo)
        return weights
