"""Poolings, whose windows read halos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hetconv.sharding.conv_spec import Span, Window
from hetconv.sharding.layer_rules import (
    REPLICATE,
    Gather,
    OpSharding,
    Split,
    window_reads,
)
from hetconv.sharding.layout import Layout, Shape, apportion

from .base import (
    Args,
    Call,
    Kwargs,
    Reader,
    arg,
    per_dim,
    per_sample,
    reduce_scattered,
    resharded,
    slab_reads,
)


@dataclass(frozen=True)
class Pool:
    """Pooling with one window per spatial dimension; without windows only torch knows
    what an output reads.

    ``other``: neither the maximum nor the average, and without padding, so that a slab
    is pooled as called.
    """

    kind: Literal["max", "average", "other"]
    shape: Shape
    windows: tuple[Window, ...] = ()
    count_padding: bool = True

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or x.dim is None or (x.dim > 1 and not self.windows):
            return Gather(self.shape).sharding(inputs)
        if x.dim < 2:
            return OpSharding((x,), resharded(x, self.shape, x.dim, x.sizes))
        y = resharded(x, self.shape, x.dim, apportion(self.shape[x.dim], x.sizes))
        return OpSharding(
            (window_reads(x.shape, y, x.dim, self.windows[x.dim - 2]),), y
        )


@dataclass(frozen=True)
class AdaptivePool:
    """Output i of m pools the inputs from floor(i n / m) to ceil((i + 1) n / m), of n,
    in each spatial dimension.
    """

    kind: Literal["max", "average"]
    shape: Shape

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = reduce_scattered(inputs[0])
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).sharding(inputs)
        if x.dim < 2:
            return OpSharding((x,), resharded(x, self.shape, x.dim, x.sizes))
        y = resharded(x, self.shape, x.dim, apportion(self.shape[x.dim], x.sizes))
        reads = [
            self.reads(x.dim, x.shape[x.dim], (b.lo[x.dim], b.hi[x.dim]))
            for b in y.boxes
        ]
        return OpSharding((slab_reads(x.shape, x.dim, reads),), y)

    def reads(self, dim: int, n: int, out: Span) -> Span:
        """The inputs, of ``n`` along ``dim``, that the outputs ``out`` pool."""
        m = self.shape[dim]
        return (out[0] * n // m, -(-out[1] * n // m)) if out[0] < out[1] else (0, 0)


@dataclass(frozen=True)
class GlobalAveragePool:
    """Adaptive average pooling to one pixel. A cut over space gives summands of the mean."""

    shape: Shape

    @per_sample()
    def sharding(
        self, inputs: tuple[Layout, ...], split: Split = REPLICATE
    ) -> OpSharding:
        x = inputs[0]
        if x.kind == "partial":
            return OpSharding((x,), Layout.partial(self.shape, x.world, x.shares))
        if x.kind != "sharded" or x.dim is None:
            return Gather(self.shape).sharding(inputs)
        if x.dim < 2:
            return OpSharding((x,), resharded(x, self.shape, x.dim, x.sizes))
        return OpSharding((x,), Layout.partial(self.shape, x.world, x.sizes))


def _pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, maximum, count = (
        arg(args, kwargs, 0, "input"),
        name.startswith("max"),
        int(name[-2]),
    )
    kernel, stride = (
        per_dim(arg(args, kwargs, 1, "kernel_size"), count),
        arg(args, kwargs, 2, "stride"),
    )
    stride = per_dim(stride, count) if stride not in (None, (), []) else kernel
    pad = per_dim(arg(args, kwargs, 3, "padding", 0), count)
    dilation = (
        per_dim(arg(args, kwargs, 4, "dilation", 1), count) if maximum else (1,) * count
    )
    ceil = arg(args, kwargs, 5 if maximum else 4, "ceil_mode", False)
    indices = maximum and arg(args, kwargs, 6, "return_indices", False)
    count_padding = True if maximum else arg(args, kwargs, 5, "count_include_pad", True)
    divisor = None if maximum else arg(args, kwargs, 6, "divisor_override")
    too_much = any(
        2 * p > k for p, k in zip(pad, kernel, strict=True)
    )  # torch refuses it: let it
    if x.dim() != count + 2 or indices or too_much:
        return None
    found = map(
        _window, x.shape[2:], kernel, stride, dilation, pad, (bool(ceil),) * count
    )
    call = _call("max" if maximum else "average", x, tuple(found), bool(count_padding))
    return call if divisor is None or call is None else _as_called(call)


def _window(
    size: int, kernel: int, stride: int, dilation: int, pad: int, ceil: bool
) -> Window:
    """Rounding up, a last window that begins within the input, or the padding before
    it, may end beyond both.
    """
    reach = dilation * (kernel - 1) + 1
    last = -(-(size + 2 * pad - reach) // stride) if ceil else 0
    if last * stride >= size + pad:
        last -= 1
    return Window(
        kernel, stride, dilation, pad, max(pad, last * stride + reach - size - pad)
    )


def _call(
    kind: Any, x: Any, windows: tuple[Window, ...], count_padding: bool = True
) -> Call | None:
    shape = (
        *x.shape[:2],
        *(w.out_size(n) for w, n in zip(windows, x.shape[2:], strict=True)),
    )
    return (
        Call(Pool(kind, shape, windows, count_padding), (x,))
        if 0 not in (*shape, *x.shape)
        else None
    )


def _as_called(call: Call) -> Call:
    """The same sizes, but a function of the windows that only torch knows."""
    op = call.op
    assert isinstance(op, Pool)
    padded = any(w.pad_lo or w.pad_hi for w in op.windows)
    return Call(Pool("other", op.shape, () if padded else op.windows), call.inputs)


def _lp_pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    given = {
        "input": args[0] if args else kwargs["input"],
        "kernel_size": arg(args, kwargs, 2, "kernel_size"),
    }
    given |= {
        "stride": arg(args, kwargs, 3, "stride"),
        "ceil_mode": arg(args, kwargs, 4, "ceil_mode", False),
    }
    call = _pool(name, (), given)
    return _as_called(call) if call is not None else None


def _adaptive(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, size, count = (
        arg(args, kwargs, 0, "input"),
        arg(args, kwargs, 1, "output_size"),
        int(name[-2]),
    )
    if x.dim() != count + 2 or arg(args, kwargs, 2, "return_indices", False):
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
    """Pooling to a size; with the same windows everywhere if it divides that of the input."""
    shape = (*x.shape[:2], *out)
    if kind == "average" and set(out) == {1}:
        return Call(GlobalAveragePool(shape), (x,))
    if any(n % m for n, m in zip(x.shape[2:], out, strict=True)):
        return Call(AdaptivePool(kind, shape), (x,))
    return _call(
        kind,
        x,
        tuple(Window(n // m, n // m) for n, m in zip(x.shape[2:], out, strict=True)),
    )


READERS: dict[str, Reader] = {
    **{f"{kind}_pool{count}d": _pool for kind in ("max", "avg") for count in (1, 2, 3)},
    **{
        f"adaptive_{kind}_pool{count}d": _adaptive
        for kind in ("max", "avg")
        for count in (1, 2, 3)
    },
    **{f"lp_pool{count}d": _lp_pool for count in (1, 2, 3)},
}
