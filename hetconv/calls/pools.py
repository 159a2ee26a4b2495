"""Calls of poolings."""

from __future__ import annotations

from ..following import GlobalAveragePool, Pool
from ..spec import Window
from .base import Args, Call, Kwargs, Reader, arg, pair


def _pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, kernel = arg(args, kwargs, 0, "input"), pair(arg(args, kwargs, 1, "kernel_size"))
    stride = arg(args, kwargs, 2, "stride")
    stride = pair(stride) if stride not in (None, (), []) else kernel
    pad, maximum = pair(arg(args, kwargs, 3, "padding", 0)), name == "max_pool2d"
    dilation = pair(arg(args, kwargs, 4, "dilation", 1)) if maximum else (1, 1)
    ceil = arg(args, kwargs, 5 if maximum else 4, "ceil_mode", False)
    indices = maximum and arg(args, kwargs, 6, "return_indices", False)
    count = True if maximum else arg(args, kwargs, 5, "count_include_pad", True)
    divisor = None if maximum else arg(args, kwargs, 6, "divisor_override")
    too_much = any(2 * p > k for p, k in zip(pad, kernel, strict=True))  # torch refuses it: let it
    if x.dim() != 4 or ceil or indices or divisor is not None or too_much:
        return None
    windows = tuple(Window(k, s, d, p, p) for k, s, d, p in zip(kernel, stride, dilation, pad, strict=True))
    shape = (*x.shape[:2], *(w.out_size(n) for w, n in zip(windows, x.shape[2:], strict=True)))
    if 0 in shape:
        return None
    return Call(Pool("max" if maximum else "average", shape, (windows[0], windows[1]), bool(count)), (x,))


def _adaptive(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, size = arg(args, kwargs, 0, "input"), arg(args, kwargs, 1, "output_size")
    if x.dim() != 4 or tuple(size if isinstance(size, (tuple, list)) else (size, size)) != (1, 1):
        return None
    return Call(GlobalAveragePool((*x.shape[:2], 1, 1)), (x,))


READERS: dict[str, Reader] = {"max_pool2d": _pool, "avg_pool2d": _pool, "adaptive_avg_pool2d": _adaptive}
