"""Poolings, whose windows read halos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from torch import Tensor

from hetconv.sharding.conv_spec import Span, Window
from hetconv.sharding.layout import Layout, Layouts, Shape
from hetconv.sharding.rule import OpSharding

from .base import (
    Args,
    Call,
    Kwargs,
    PerSampleOperator,
    Reader,
    WindowOperator,
    bind,
    per_dim,
)


@dataclass(frozen=True)
class Pool(WindowOperator):
    """A pooling with one window per spatial dimension.

    Attributes:
        kind: "max", "average", or "other" for a pooling without padding, of which ranks
            call torch's own function on a slab of the input.
        shape: Shape of the output.
        windows: The windows; none where only torch knows what an output reads.
        count_padding: Whether an average counts padding.
    """

    kind: Literal["max", "average", "other"]
    shape: Shape
    windows: tuple[Window, ...] = ()
    count_padding: bool = True

    def reads(self, dim: int, n: int, out: Span) -> Span:
        """Returns the inputs, of ``n`` along ``dim``, that the outputs ``out`` pool."""
        return self.windows[dim - 2].reads(out, n)

    def _knows_reads(self, shape: Shape) -> bool:
        return bool(self.windows)


@dataclass(frozen=True)
class AdaptivePool(WindowOperator):
    """An adaptive pooling with windows of unequal size.

    Output i of m pools the inputs from floor(i n / m) to ceil((i + 1) n / m), of n, in
    each spatial dimension.

    Averages of a few large windows are partial results: each rank sums its own rows.

    Attributes:
        kind: "max" or "average".
        shape: Shape of the output.
    """

    kind: Literal["max", "average"]
    shape: Shape

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        sharding, x = super()._follow(inputs), inputs[0]
        if x.dim is None or x.dim < 2 or not self._has_few_windows(x.shape, x.dim):
            return sharding
        if sum(size > 0 for size in x.sizes) == 1:  # nothing is sent
            return sharding
        return OpSharding((x,), Layout.partial(self.shape, x.world, x.sizes))

    def _has_few_windows(self, shape: Shape, dim: int) -> bool:
        """Whether to sum averages of the input's rows rather than to exchange halos.

        A cut along ``dim`` divides a window: half of its rows travel on the average.
        The sum of all averages travels both ways.
        """
        halo = prod(shape[2:]) / (2 * self.shape[dim])
        return self.kind == "average" and 2 * prod(self.shape[2:]) < halo

    def reads(self, dim: int, n: int, out: Span) -> Span:
        """Returns the inputs, of ``n`` along ``dim``, that the outputs ``out`` pool."""
        if out[0] >= out[1]:
            return (0, 0)
        m = self.shape[dim]
        return out[0] * n // m, -(-out[1] * n // m)


@dataclass(frozen=True)
class GlobalAveragePool(PerSampleOperator):
    """An adaptive average pooling to one pixel.

    An input that is sharded along a spatial dimension gives a partial result.

    Attributes:
        shape: Shape of the output.
    """

    shape: Shape

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = inputs[0]
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.dim is None:
            return None
        if x.dim < 2:
            return OpSharding((x,), Layout.sharded(self.shape, x.dim, x.sizes))
        return OpSharding((x,), Layout.partial(self.shape, x.world, x.sizes))


def _spatial_dims(name: str) -> int:
    """Returns the number of spatial dimensions in a name such as max_pool2d."""
    return int(name[-2])


def _read_max_pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, kernel, stride, padding, dilation, ceil_mode, indices = bind(
        args,
        kwargs,
        input=None,
        kernel_size=None,
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=False,
    )
    if indices:
        return None
    windows = _windows(name, x, kernel, stride, padding, dilation, ceil_mode)
    return _pool_call("max", x, windows) if windows is not None else None


def _read_avg_pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, kernel, stride, padding, ceil_mode, count_padding, divisor = bind(
        args,
        kwargs,
        input=None,
        kernel_size=None,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    )
    windows = _windows(name, x, kernel, stride, padding, 1, ceil_mode)
    if windows is None:
        return None
    if divisor is not None:
        return _other_pool_call(x, windows)
    return _pool_call("average", x, windows, bool(count_padding))


def _read_lp_pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, _, kernel, stride, ceil_mode = bind(
        args,
        kwargs,
        input=None,
        norm_type=None,
        kernel_size=None,
        stride=None,
        ceil_mode=False,
    )
    windows = _windows(name, x, kernel, stride, 0, 1, ceil_mode)
    return _other_pool_call(x, windows) if windows is not None else None


def _windows(
    name: str,
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: Any,
) -> tuple[Window, ...] | None:
    """Returns the window along each spatial dimension; None for what torch refuses."""
    count = _spatial_dims(name)
    kernel, pad = per_dim(kernel, count), per_dim(padding, count)
    stride = kernel if stride in (None, (), []) else per_dim(stride, count)
    if x.dim() != count + 2:
        return None
    if any(2 * p > k for p, k in zip(pad, kernel, strict=True)):
        return None
    options = (kernel, stride, per_dim(dilation, count), pad)
    sides = zip(x.shape[2:], *options, strict=True)
    return tuple(_window(*side, bool(ceil_mode)) for side in sides)


def _window(
    size: int, kernel: int, stride: int, dilation: int, pad: int, ceil_mode: bool
) -> Window:
    """Returns the window along one dimension, with its padding at the end.

    With ``ceil_mode`` a last window that begins within the input, or the padding before
    it, may end beyond both.
    """
    reach = dilation * (kernel - 1) + 1
    last = -(-(size + 2 * pad - reach) // stride) if ceil_mode else 0
    if last * stride >= size + pad:
        last -= 1
    pad_hi = max(pad, last * stride + reach - size - pad)
    return Window(kernel, stride, dilation, pad, pad_hi)


def _pool_call(
    kind: Literal["max", "average", "other"],
    x: Tensor,
    windows: tuple[Window, ...],
    count_padding: bool = True,
) -> Call | None:
    sizes = (w.out_size(n) for w, n in zip(windows, x.shape[2:], strict=True))
    shape = (*x.shape[:2], *sizes)
    if 0 in (*shape, *x.shape):
        return None
    return Call(Pool(kind, shape, windows, count_padding), (x,))


def _other_pool_call(x: Tensor, windows: tuple[Window, ...]) -> Call | None:
    """Returns a pooling that torch computes on slabs, or with padding only gathered."""
    call = _pool_call("other", x, windows)
    if call is None or not any(w.pad_lo or w.pad_hi for w in windows):
        return call
    assert isinstance(call.op, Pool)
    return Call(replace(call.op, windows=()), (x,))


def _read_adaptive_pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, size, indices = bind(
        args, kwargs, input=None, output_size=None, return_indices=False
    )
    count = _spatial_dims(name)
    if x.dim() != count + 2 or indices:
        return None
    given = tuple(size) if isinstance(size, (tuple, list)) else (size,) * count
    if len(given) != count:
        return None
    out = [n if m is None else m for n, m in zip(x.shape[2:], given, strict=True)]
    if any(n < 1 for n in (*x.shape, *out)):
        return None
    return adaptive_pool("max" if "max" in name else "average", x, out)


def adaptive_pool(
    kind: Literal["max", "average"], x: Tensor, out: Sequence[int]
) -> Call | None:
    """Returns the call of an adaptive pooling.

    It has the same window everywhere if each output size divides that of the input.

    Args:
        kind: "max" or "average".
        x: The input.
        out: Size of the output in each spatial dimension.
    """
    shape = (*x.shape[:2], *out)
    if kind == "average" and set(out) == {1}:
        return Call(GlobalAveragePool(shape), (x,))
    sizes = list(zip(x.shape[2:], out, strict=True))
    if any(n % m for n, m in sizes):
        return Call(AdaptivePool(kind, shape), (x,))
    return _pool_call(kind, x, tuple(Window(n // m, n // m) for n, m in sizes))


_READERS_BY_PREFIX: dict[str, Reader] = {
    "adaptive_avg_pool": _read_adaptive_pool,
    "adaptive_max_pool": _read_adaptive_pool,
    "avg_pool": _read_avg_pool,
    "lp_pool": _read_lp_pool,
    "max_pool": _read_max_pool,
}
READERS: dict[str, Reader] = {
    f"{prefix}{count}d": reader
    for prefix, reader in _READERS_BY_PREFIX.items()
    for count in (1, 2, 3)
}
