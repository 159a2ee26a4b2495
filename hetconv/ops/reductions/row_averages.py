"""Adaptive averages of images that are cut by rows, as sums of the ranks' own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from hetconv.kernels import CHANNELS_LAST
from hetconv.operators.pooling import AdaptivePool
from hetconv.runtime.inputs import empty_output
from hetconv.sharding.conv_spec import Span


@dataclass(frozen=True, eq=False)
class RowAverages:
    """What the rows of a shard add to the outputs of an adaptive average pooling.

    A run is a range of rows that belong to the same windows.

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
        """Averages rows that are in the same windows, and what belongs to each window."""
        if not x.numel():
            # The data type depends on autocast, as torch alone knows.
            like = self.pooling(x.new_zeros((1,) * x.dim()), 1)
            return empty_output(self.shape, x).to(like.dtype)
        last = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
        if not x.is_contiguous() and x.is_contiguous(memory_format=last):
            # torch is slow to average rows of such an image, and fast within rows.
            x = self._averaged_within_rows(x)
        runs = x.split(self._run_lengths, self.dim)
        rows = torch.stack([run.mean(self.dim) for run in runs], self.dim)
        return self._averages_of_windows(self._averaged_within_rows(rows))

    def _averaged_within_rows(self, x: Tensor) -> Tensor:
        """Averages along the other spatial dimensions."""
        out = [*self.shape[2:]]
        out[self.dim - 2] = x.shape[self.dim]
        return self.pooling(x, out)

    def _averages_of_windows(self, y: Tensor) -> Tensor:
        """Adds up averages of runs by their fractions of the windows.

        No average is multiplied by zero, because it may be infinite.
        """
        index, fractions = (t.to(y.device) for t in self._runs_of_windows)
        exact = y.dtype if y.dtype == torch.float64 else torch.float32
        zero = torch.zeros_like(y.narrow(self.dim, 0, 1))
        runs = torch.cat((y, zero), self.dim).index_select(self.dim, index.flatten())
        fractions = fractions.to(exact).view(-1, *(1,) * (y.dim() - 1 - self.dim))
        weighted: Tensor = (runs * fractions).unflatten(self.dim, index.shape)
        return weighted.sum(self.dim + 1).to(y.dtype)

    @cached_property
    def _windows(self) -> list[Span]:
        """Own rows of each output's window, of which there may be none."""
        count, (first, last) = self.shape[self.dim], self.rows
        reads = (self.op.reads(self.dim, self.size, (i, i + 1)) for i in range(count))
        return [
            (min(max(lo, first), last), max(min(hi, last), first)) for lo, hi in reads
        ]

    @cached_property
    def _run_bounds(self) -> list[int]:
        """The own rows at which a window begins or ends."""
        return sorted(
            {*self.rows, *(bound for span in self._windows for bound in span)}
        )

    @cached_property
    def _run_lengths(self) -> list[int]:
        return [hi - lo for lo, hi in pairwise(self._run_bounds)]

    @cached_property
    def _runs_of_windows(self) -> tuple[Tensor, Tensor]:
        """(outputs, R): the runs of each window, and which fractions of it they are.

        Where there are less than R, the number of all runs stands for none.
        """
        runs = list(pairwise(self._run_bounds))
        found = [
            [k for k, (a, b) in enumerate(runs) if lo <= a and b <= hi]
            for lo, hi in self._windows
        ]
        index = torch.full((len(found), max(map(len, found))), len(runs), device="cpu")
        fractions = torch.zeros(index.shape, dtype=torch.float64, device="cpu")
        for i, own in enumerate(found):
            lo, hi = self.op.reads(self.dim, self.size, (i, i + 1))
            for place, k in enumerate(own):
                index[i, place] = k
                fractions[i, place] = self._run_lengths[k] / (hi - lo)
        return index, fractions
