"""How an operator runs on parts. `dispatch` is what a HetTensor does; `RUN` has one entry per kind of operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from ..calls import BatchNormCall, Call, read, writes_in_place
from ..errors import HetConvError
from ..following import BatchNorm, Cat, Flatten, GlobalAveragePool, PixelShuffle, Pointwise, Pool
from ..layout import Layout
from ..rules import REPLICATE, Op, Step
from ..tensor import HetTensor, compute_waiting, gather, install_dispatch
from ..transport import Team
from .common import bring, empty_output, placement_of
from .conv import conv2d
from .dense import linear
from .norm import batch_norm
from .pool import global_average_pool, pool
from .waiting import fold

__all__ = ["conv2d", "dispatch", "linear"]

Func = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]

# Asked of the wrapper, which knows the global shape, or of the local part, which knows autograd and memory.
GLOBAL: set[Any] = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, torch.numel, torch.is_floating_point, torch.is_complex,
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "ndim", "dtype", "device", "layout", "itemsize", "is_cuda", "is_sparse", "is_quantized", "is_mkldnn",
    )),
}  # fmt: skip
LOCAL: set[Any] = {
    Tensor.is_contiguous, Tensor.is_inference, torch.is_inference,
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")),
}  # fmt: skip
# Done to a gathered copy they would never see a gradient.
REFUSED = {Tensor.register_hook, Tensor.retain_grad}


def dispatch(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Runs a torch function that was given a HetTensor: on parts where there is a rule, else on gathered tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        if func in GLOBAL:
            return func(*args, **kwargs)
        if func in LOCAL:
            return func(args[0].local, *args[1:], **kwargs)
        if func in REFUSED:
            raise HetConvError(
                f"{func.__name__} was called on a tensor in parts; call it on y = hetconv.gather(x) and go on with y"
            )
        call = read(func, args, kwargs)
        if call is not None:
            team = next(x.team for x in call.inputs if isinstance(x, HetTensor)) if _het(call.inputs) else None
            step = cached_step(call.op, tuple(placement_of(x, team) for x in call.inputs)) if team else None
            if team is not None and step is not None and runs_on_parts(call, step):
                folded = fold(call, step, func, args, kwargs)
                if folded is not None:
                    return _finish(call, folded)
                if call.in_place:
                    compute_waiting()
                return _finish(call, RUN[type(call.op)](call, step, team, func, args, kwargs))
        if writes_in_place(func, kwargs) or kwargs.get("out") is not None:
            compute_waiting()
        return on_gathered(func, args, kwargs)


def _het(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(x, HetTensor) for x in tensors)


@lru_cache(maxsize=8192)
def cached_step(op: Op, inputs: tuple[Layout, ...]) -> Step:
    return op.step(inputs, REPLICATE)


def runs_on_parts(call: Call, step: Step) -> bool:
    """Not where the result is replicated anyway, nor where a plain tensor is to be written to."""
    return step.output.kind != "replicated" and not (call.in_place and not isinstance(call.inputs[0], HetTensor))


def _finish(call: Call, y: HetTensor) -> HetTensor:
    """A call in place leaves its result in the HetTensor that it was called on."""
    target = call.inputs[0]
    if not call.in_place or not isinstance(target, HetTensor):
        return y
    target.become(y)
    return target


def on_gathered(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Gathers every HetTensor among the arguments and runs the function on plain tensors.

    A HetTensor that the call writes to, or returns a view of, becomes replicated, so that both go on sharing memory.
    """
    whole: dict[int, tuple[HetTensor, Tensor]] = {}

    def plain(x: Any) -> Any:
        if not isinstance(x, HetTensor):
            return x
        if id(x) not in whole:
            whole[id(x)] = (x, gather(x))
        return whole[id(x)][1]

    result = func(*tree_map(plain, args), **tree_map(plain, dict(kwargs)))
    written = args[0] if args and writes_in_place(func, kwargs) else kwargs.get("out")
    memory = {r.untyped_storage().data_ptr() for r in tree_iter(result) if isinstance(r, Tensor)}
    for x, gathered in whole.values():
        if x is written or gathered.untyped_storage().data_ptr() in memory:
            x.local, x.placement = gathered, Layout.replicated(x.placement.shape, x.team.size)
    return written if isinstance(written, HetTensor) and result is not None else result


def _pointwise(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    local = {id(x): bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)}

    def part(a: Any) -> Any:
        return local.get(id(a), a) if isinstance(a, Tensor) else a

    y = func(*map(part, args), **{k: part(v) for k, v in kwargs.items()})
    return HetTensor.wrap(y, step.output, team)


def _cat(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    assert isinstance(call.op, Cat)
    parts = [bring(x, r, team) for x, r in zip(call.inputs, step.reads, strict=True)]
    return HetTensor.wrap(torch.cat(parts, call.op.dim), step.output, team)


def _reshaped(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    """Operators whose local form is their own call on the part."""
    x = bring(call.inputs[0], step.reads[0], team)
    if isinstance(call.op, Flatten):
        return HetTensor.wrap(x.reshape(step.output.boxes[team.rank].shape), step.output, team)
    if not x.numel():  # torch's own backward gives an empty gradient of another shape
        return HetTensor.wrap(empty_output(x, step.output.boxes[team.rank].shape), step.output, team)
    return HetTensor.wrap(func(x, *args[1:], **_rest(kwargs)), step.output, team)


def _rest(kwargs: Kwargs) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "input"}


def _norm(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    assert isinstance(call, BatchNormCall)
    return batch_norm(call, step, team)


def _pooled(call: Call, step: Step, team: Team, func: Func, args: Args, kwargs: Kwargs) -> HetTensor:
    run = pool if isinstance(call.op, Pool) else global_average_pool
    return run(call, step, team, lambda x: func(x, *args[1:], **_rest(kwargs)))


RUN: dict[type[Any], Callable[[Call, Step, Team, Func, Args, Kwargs], HetTensor]] = {
    Pointwise: _pointwise,
    BatchNorm: _norm,
    Pool: _pooled,
    GlobalAveragePool: _pooled,
    PixelShuffle: _reshaped,
    Flatten: _reshaped,
    Cat: _cat,
}

install_dispatch(dispatch)
