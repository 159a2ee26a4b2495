"""Pooling on parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..calls import Call
from ..following import GlobalAveragePool, Pool
from ..rules import Step
from ..spec import Window
from ..tensor import HetTensor
from ..transport import Team
from .common import Args, Func, Kwargs, Runner, bring, empty_output, without_input


def pool(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Cut over samples or channels, as called; cut over space, on the rows (columns) that the own output reads."""
    op, layout = call.op, step.output
    assert isinstance(op, Pool)
    assert layout.dim is not None
    x = bring(call.inputs[0], step.reads[0], team)
    box = layout.boxes[team.rank]
    if not box.numel:
        y = empty_output(x, box.shape)
    elif layout.dim < 2:
        y = func(x, *args[1:], **without_input(kwargs))
    else:
        y = _slab(op, x, layout.dim, (box.lo[layout.dim], box.hi[layout.dim]), tuple(call.inputs[0].shape[2:]))
    return HetTensor.wrap(y, layout, team)


def _slab(op: Pool, x: Tensor, dim: int, out: tuple[int, int], sizes: tuple[int, ...]) -> Tensor:
    """The output span ``out`` from the slab ``x`` that it reads; padding is made explicit where a side has any."""
    sides = [(w.pad_lo, w.pad_hi) for w in op.windows]
    sides[dim - 2] = op.windows[dim - 2].padding(out, sizes[dim - 2])
    kernel, stride = [w.kernel for w in op.windows], [w.stride for w in op.windows]
    pads = (*sides[1], *sides[0])
    if op.kind == "max":
        x = F.pad(x, pads, value=float("-inf")) if any(pads) else x
        return F.max_pool2d(x, kernel, stride, 0, [w.dilation for w in op.windows])
    x = F.pad(x, pads) if any(pads) else x
    if op.count_padding or not any(w.pad_lo or w.pad_hi for w in op.windows):
        return F.avg_pool2d(x, kernel, stride)
    counts = [_counts(w, n, x.device) for w, n in zip(op.windows, sizes, strict=True)]
    counts[dim - 2] = counts[dim - 2][out[0] : out[1]]
    return F.avg_pool2d(x, kernel, stride, divisor_override=1) / (counts[0][:, None] * counts[1]).to(x.dtype)


def _counts(window: Window, size: int, device: torch.device) -> Tensor:
    """How many inputs, padding apart, each output of a window averages."""
    spans = [window.reads((p, p + 1), size) for p in range(window.out_size(size))]
    return torch.tensor([hi - lo for lo, hi in spans], device=device)


def global_average_pool(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Over a cut of space each rank's summand is its own sum over the whole count."""
    op = call.op
    assert isinstance(op, GlobalAveragePool)
    x = bring(call.inputs[0], step.reads[0], team)
    shape = step.output.boxes[team.rank].shape
    if step.output.kind == "partial":
        y = x.sum((2, 3), keepdim=True) / (call.inputs[0].shape[2] * call.inputs[0].shape[3])
    else:
        y = func(x, *args[1:], **without_input(kwargs)) if x.numel() else empty_output(x, shape)
    return HetTensor.wrap(y, step.output, team)


RUN: dict[type[Any], Runner] = {Pool: pool, GlobalAveragePool: global_average_pool}
