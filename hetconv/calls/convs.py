"""Calls of transposed convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hetconv.operators import ConvTranspose, TransposedWindow

from .base import Args, Call, Kwargs, Reader, arg, per_dim


@dataclass(frozen=True)
class ConvTransposeCall(Call):
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def params(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.weight, self.bias) if p is not None)


def _conv_transpose(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, w, b = (arg(args, kwargs, i, n) for i, n in enumerate(("input", "weight", "bias")))
    if x.dim() != w.dim():
        return None
    given = ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1))
    stride, pad, extra, dilation = (per_dim(arg(args, kwargs, i, n, default), x.dim() - 2) for i, n, default in given)
    groups = arg(args, kwargs, 6, "groups", 1)
    sides = zip(w.shape[2:], stride, dilation, pad, extra, strict=True)
    windows = tuple(TransposedWindow(*side) for side in sides)
    sizes = [v.out_size(n) for v, n in zip(windows, x.shape[2:], strict=True)]
    if min(sizes) < 1 or x.shape[1] != w.shape[0]:
        return None  # torch refuses it: let it
    op = ConvTranspose((x.shape[0], w.shape[1] * groups, *sizes), windows, groups)
    return ConvTransposeCall(op, (x,), weight=w, bias=b)


READERS: dict[str, Reader] = dict.fromkeys(
    ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose
)
