"""A convolution that waits for what follows it: what can be done as its sums are stored is folded into it.

Only without autograd, and only for the functions that a plan lists as its sole followers. Anything else that is done to
the result has it computed first, as it stands, so that the listing is a hint and never decides what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calls import BatchNormCall, Call, activation_of, name_of
from ..errors import HetConvError
from ..following import BatchNorm
from ..layout import Box, Layout
from ..replicas import SCOPE
from ..rules import Step
from ..tensor import HetTensor
from ..transport import Team
from .chunks import gathered_in_chunks
from .common import bring
from .geometry import Geometry
from .halo import NOTHING, After, computed


@dataclass(frozen=True, eq=False)
class Waiting:
    """This rank's part of a convolution, put off, with what was folded into it so far. A call computes it.

    ``expects``: what may be folded next, in order. ``chunks`` of the batch in which it is gathered, where the whole is
    asked for. ``seen``: tensors that are read then, at their versions of now.
    """

    x: Tensor
    w: Tensor
    b: Tensor | None
    geo: Geometry
    layout: Layout
    team: Team
    expects: tuple[str, ...]
    chunks: int = 1
    after: After = NOTHING
    seen: tuple[tuple[Tensor, int], ...] = ()

    def with_residual(self, residual: Tensor) -> Waiting:
        after = self.after._replace(residual=residual)
        return replace(self, after=after, seen=self.seen + version(residual))

    def __call__(self) -> Tensor:
        with self._reading():
            return computed(self.x, self.w, self.b, self.geo, self.team, self.after)[0]

    def gathered(self) -> Tensor | None:
        if min(self.chunks, self.layout.shape[0]) < 2 or self.layout.dim != 1:
            return None
        with self._reading():
            return gathered_in_chunks(self.x, self.w, self.b, self.geo, self.team, self.after, self.layout, self.chunks)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if any(t._version != version for t, version in self.seen):
            raise HetConvError(
                "the input of a convolution was written to in place before what follows the convolution was called; "
                "write to a copy, or call parallelize without fuse=True"
            )
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            yield


def version(t: Tensor) -> tuple[tuple[Tensor, int], ...]:
    """An entry of `Waiting.seen`; an inference tensor keeps no count."""
    return () if t.is_inference() else ((t, t._version),)


def may_wait(x: Tensor) -> bool:
    """Within a parallelized model's forward, without autograd, and not where writes to ``x`` would go unnoticed."""
    if torch.is_grad_enabled() or SCOPE.get() is None:
        return False
    if isinstance(x, HetTensor):
        return x.placement.kind != "replicated" or not x.local.is_inference()
    return not x.is_inference()


def fold(
    call: Call, step: Step, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> HetTensor | None:
    """The result of a call on a convolution that waits for it, which goes on waiting; None if it is another call."""
    name = name_of(func)
    for i, x in enumerate(call.inputs if not call.in_place else call.inputs[:1]):
        if not isinstance(x, HetTensor) or not isinstance(x.later, Waiting) or x.later.expects[:1] != (name,):
            continue
        if step.output != x.placement:
            continue
        waiting = replace(x.later, expects=x.later.expects[1:])
        folded = _folded(waiting, call, i, step, args, kwargs, name)
        if folded is not None:
            return x.superseded_by(folded)
    return None


def _folded(
    waiting: Waiting, call: Call, i: int, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Waiting | None:
    """With one more thing done after the convolution, if it can be: input ``i`` of the call is what waits."""
    after = waiting.after
    if isinstance(call, BatchNormCall):
        assert isinstance(call.op, BatchNorm)
        if call.op.training or after != NOTHING:
            return None
        return replace(waiting, after=_normalizing(call, step.output.boxes[waiting.team.rank], waiting.x.dtype))
    if after.activation is not None:
        return None
    if name == "add":
        others = [(x, r) for j, (x, r) in enumerate(zip(call.inputs, step.reads, strict=True)) if j != i]
        if after.residual is not None or len(others) != 1 or kwargs.get("alpha", 1) != 1:
            return None
        other, read = others[0]
        like = call.inputs[i]
        if other is like or other.shape != like.shape or other.dtype != like.dtype or not may_wait(other):
            return None
        return waiting.with_residual(bring(other, read, waiting.team))
    activation = activation_of(name, args, kwargs)
    if activation is None:
        return None
    return replace(waiting, after=after._replace(activation=activation[0], slope=activation[1]))


def _normalizing(call: BatchNormCall, box: Box, dtype: torch.dtype) -> After:
    """Batch norm in evaluation, of this rank's channels, as a scale and a shift."""
    assert call.mean is not None
    assert call.var is not None
    own, exact = slice(box.lo[1], box.hi[1]), torch.promote_types(dtype, torch.float32)
    mean, var, weight, bias = (
        t[own].detach().to(exact) if t is not None else None for t in (call.mean, call.var, call.weight, call.bias)
    )
    assert mean is not None
    assert var is not None
    scale = (var + call.eps).rsqrt_()
    scale = scale * weight if weight is not None else scale
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    return After(scale, shift)
