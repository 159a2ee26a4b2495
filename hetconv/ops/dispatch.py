"""Dispatch of torch functions that are called on HetTensors.

A function runs on shards if its operator has a sharding rule, and else on gathered
tensors. There is one module per family of operators, which runs its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hetconv.comm import call_tags
from hetconv.comm.redistribute import clone_if_aliased
from hetconv.errors import HetConvError
from hetconv.operators import read_call
from hetconv.operators.base import Call, writes_in_place
from hetconv.operators.conv_transpose import ConvTranspose
from hetconv.operators.elementwise import Pointwise
from hetconv.operators.norms import BatchNorm, GroupNorm
from hetconv.operators.pooling import AdaptivePool, Pool
from hetconv.operators.random import Dropout, NoiseLike
from hetconv.operators.resampling import Interpolate, Pad, PixelUnshuffle
from hetconv.operators.shapes import Cat, PixelShuffle
from hetconv.runtime import het_tensor
from hetconv.runtime.het_tensor import HetTensor, compute_deferred, register_dispatcher
from hetconv.runtime.inputs import Args, Func, Kwargs, cached_sharding, layout_of
from hetconv.sharding.rule import Gather, OpSharding
from hetconv.torch_internals import (
    checkpoint_saver,
    no_torch_function,
    storage_id,
    tree_iter,
    tree_map,
)
from hetconv.torch_patches import Undo, register_patch, replace_function_apply

from . import as_called, call_cache, conv, pooling, resampling, view_calls, views
from .as_called import AgainMaker, Runner, ShardedCall, called_on, check_draws
from .deferred import fuse
from .norms import calls as norm_calls
from .norms.deferred_norm import followed
from .reductions import extremes
from .trial_run import Verdict, trial


def gather_for_functions(on_gathered: Callable[..., Any]) -> Undo:
    """Patches `torch.autograd.Function.apply`, so that it runs on gathered tensors.

    Args:
        on_gathered: Runs a function whose arguments include HetTensors.

    Returns:
        A function that undoes the patch.
    """

    def apply(cls: type, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if cls is checkpoint_saver or HetTensor not in map(type, args):
            result = plain(*args, **kwargs)
        else:
            call_tags.enter(cls.__name__)
            compute_deferred()  # it may write in place
            result = on_gathered(plain, args, kwargs)
        if torch.is_grad_enabled() and HetTensor in map(
            type, result if isinstance(result, tuple) else (result,)
        ):
            raise HetConvError(
                f"{cls.__name__} returned a sharded tensor, whose gradient would be lost; "
                "return hetconv.gather(y) "
                f"from it, and give torch.utils.checkpoint use_reentrant=False"
            )
        return result

    return replace_function_apply(apply)


# The wrapper answers these, because it has the global shape.
GLOBAL: set[Any] = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.__len__,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
    Tensor.get_device,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "ndim",
            "dtype",
            "device",
            "layout",
            "itemsize",
            "is_cuda",
            "is_sparse",
            "is_quantized",
            "is_mkldnn",
        )
    ),
}
# The local shard answers these, because it has the autograd graph and the memory.
LOCAL: set[Any] = {
    Tensor.is_contiguous,
    Tensor.is_inference,
    torch.is_inference,
    *(
        getattr(Tensor, name).__get__
        for name in ("requires_grad", "grad_fn", "is_leaf")
    ),
}
# On a gathered copy these would never see a gradient.
REFUSED = {Tensor.register_hook, Tensor.retain_grad}
QUERIES = GLOBAL | LOCAL | REFUSED
# Operators whose inputs are images.
IMAGES = (
    AdaptivePool,
    BatchNorm,
    ConvTranspose,
    GroupNorm,
    Interpolate,
    Pad,
    PixelShuffle,
    PixelUnshuffle,
    Pool,
)


def dispatch(
    cls: type[HetTensor],
    func: Func,
    types: Any,
    args: Args = (),
    kwargs: Kwargs | None = None,
) -> Any:
    """Runs a torch function on HetTensors; the signature is that of `__torch_function__`."""
    kwargs = kwargs or {}
    if func in QUERIES:
        with no_torch_function():
            return _answer(func, args, kwargs)
    call_tags.enter(func)  # before the look-up, because ranks may have other caches
    known = call_cache.lookup(func, args, kwargs)
    if isinstance(known, call_cache.Key):
        with no_torch_function():
            return _run(func, args, kwargs, known)
    if known is not None:
        return known
    if (later := followed(func, args, kwargs)) is not None:
        return later
    with no_torch_function():
        return _run(func, args, kwargs, None)


def _run(func: Func, args: Args, kwargs: Kwargs, key: call_cache.Key | None) -> Any:
    """Runs a call, and stores it under ``key`` if it needs no communication."""
    verdict, found = trial(func, args, kwargs)
    if verdict.returns is not None:
        return found[verdict.returns]
    # A deferred argument has no key.
    if key is None and (fused := fuse(func, args, kwargs)) is not None:
        return fused
    call = read_call(func, args, kwargs)
    inputs = call.inputs if call is not None else ()
    group = next((x.group for x in inputs if isinstance(x, HetTensor)), None)
    if call is not None and group is None and isinstance(call.op, Gather | Pointwise):
        return _without_values(func, args, kwargs)
    written = [found[i] for i in verdict.writes] or _written(func, args, kwargs)
    other_writes = call is not None and not _writes_target_only(call, written)
    if verdict.empty or verdict.reshapes or other_writes:
        call = None
    if call is not None and group is not None:
        layouts = tuple(layout_of(x, group) for x in call.inputs)
        sharding = cached_sharding(call.op, layouts)
        fits = _fits(verdict, sharding, (*args, *kwargs.values()), found)
        if fits and runs_sharded(call, sharding):
            sharded = ShardedCall(call, sharding, group, func, args, kwargs)
            return _run_sharded(sharded, verdict, found, key)
        if isinstance(call.op, Dropout | NoiseLike):
            check_draws(group, func, [0] * group.size)
    if written:
        compute_deferred()
    images = call is not None and _reads_images(call)
    return on_gathered(func, args, kwargs, images=images, written=written)


def _run_sharded(
    c: ShardedCall,
    verdict: Verdict,
    found: Sequence[HetTensor],
    key: call_cache.Key | None,
) -> Any:
    if c.call.in_place:
        target = c.call.inputs[0]
        compute_deferred(target if isinstance(target, HetTensor) else None)
    y = _finish(c.call, RUN[type(c.call.op)](c))
    if verdict.shares and isinstance(y, HetTensor) and not views.shared(y):
        retake = _on_another(found[0], c.func, c.args, c.kwargs)
        views.link(y, found[0], retake, copies=True, images=verdict.by_order)
        return y
    if verdict.by_order and isinstance(y, HetTensor):
        # On one device it may be a copy, so that it is one here too.
        y.local = clone_if_aliased(y.local, found[0].local)
    if key is not None:
        _store(key, c, verdict)
    return y


def _store(key: call_cache.Key, c: ShardedCall, verdict: Verdict) -> None:
    """Stores a call that just ran on shards, if it can run again without being read."""
    make = AGAIN.get(type(c.call.op))
    again = make(c, verdict.by_order) if make is not None else None
    if again is not None:
        call_cache.store_again(key, again)
    elif not verdict.by_order:
        call_cache.store(key, c)


def _answer(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if func in GLOBAL:
        return func(*args, **kwargs)
    if func in LOCAL:
        return func(args[0].local, *args[1:], **kwargs)
    raise HetConvError(
        f"{func.__name__} was called on a sharded tensor; call it on y = hetconv.gather(x) "
        "and go on with y"
    )


def _without_values(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Runs a call that reads only dtype and device of HetTensors, such as x.new_zeros(3)."""

    def own(x: Any) -> Any:
        return x.local if isinstance(x, HetTensor) else x

    return func(*map(own, args), **{k: own(v) for k, v in kwargs.items()})


def runs_sharded(call: Call, sharding: OpSharding) -> bool:
    """Returns whether a call runs on shards.

    It does not if whole inputs are read for a replicated result, nor if a call in place
    must write to more than this rank's shard.
    """
    if sharding.output.kind == "replicated":
        return bool(sharding.forward_moves)
    if not call.in_place:
        return True
    target = call.inputs[0]
    return isinstance(target, HetTensor) and views.may_write(target, sharding.output)


def _writes_target_only(call: Call, written: Sequence[HetTensor]) -> bool:
    """Returns whether a call writes to nothing but the target of a call in place."""
    return all(call.in_place and x is call.inputs[0] for x in written)


def _fits(
    verdict: Verdict,
    sharding: OpSharding,
    arguments: Iterable[Any],
    found: Sequence[HetTensor],
) -> bool:
    """Returns whether a sharding rule gives the result that PyTorch does.

    Views of a tensor in a list are not taken of shards.
    """
    if verdict.shares and not any(a is found[0] for a in arguments):
        return False
    shapes = verdict.shapes
    return shapes is None or len(shapes) != 1 or shapes[0] == sharding.output.shape


def _on_another(
    x: HetTensor, func: Func, args: Args, kwargs: Kwargs
) -> Callable[[Tensor], Any]:
    """Returns the same call with another tensor in the place of ``x``."""
    return lambda other: called_on({id(x): other}, func, args, kwargs)


def _finish(
    call: Call, y: HetTensor | tuple[HetTensor, ...]
) -> HetTensor | tuple[HetTensor, ...]:
    """Stores the result of a call in place in the HetTensor that it was called on."""
    target = call.inputs[0]
    if not call.in_place or not isinstance(target, HetTensor) or isinstance(y, tuple):
        return y
    target.become(y)
    return target


def _reads_images(call: Call) -> bool:
    """Returns whether all inputs are images, in the memory format of the model's inputs."""
    op = call.op
    return isinstance(op, IMAGES) or (isinstance(op, Cat) and op.dim == 1)


def on_gathered(
    func: Func,
    args: Args,
    kwargs: Kwargs,
    *,
    images: bool = False,
    written: Sequence[HetTensor] = (),
) -> Any:
    """Gathers every HetTensor among the arguments and runs the function; collective.

    A HetTensor that the call writes to, or returns a view of, becomes replicated, so
    that both still share memory. So does every tensor that shares its memory on shards.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        images: As in `gather`.
        written: The HetTensors that the call writes to.
    """
    for x in written:
        views.make_whole(x)
    whole: dict[int, tuple[HetTensor, Tensor]] = {}

    def plain(x: Any) -> Any:
        if not isinstance(x, HetTensor):
            return x
        if id(x) not in whole:
            whole[id(x)] = (x, het_tensor.gather(x, images=images))
        return whole[id(x)][1]

    result = func(*tree_map(plain, args), **tree_map(plain, dict(kwargs)))
    memory = {
        storage_id(r)
        for r in tree_iter(result)
        if isinstance(r, Tensor) and r.layout == torch.strided
    }
    seen = [(x, y) for x, y in whole.values() if storage_id(y) in memory]
    for x, gathered in seen:
        if not views.shared(x):
            x.become_whole(gathered)
    copied = [
        x for x, _ in seen if views.shared(x) and views.shows(x, func, args, kwargs)
    ]
    if copied:  # the result is a view of a copy of the shared memory
        for x in copied:
            views.make_whole(x)
        return on_gathered(func, args, kwargs, images=images, written=written)
    for x in written:
        x.become_whole(whole[id(x)][1])
    owners = {id(whole[id(x)][1]): x for x in written}
    return tree_map(lambda r: owners.get(id(r), r), result) if owners else result


def _written(func: Func, args: Args, kwargs: Kwargs) -> list[HetTensor]:
    """Returns the HetTensors that a call writes to, by its name and its arguments."""
    in_place = args and writes_in_place(func, kwargs)
    targets = [kwargs.get("out"), args[0] if in_place else None]
    return [x for x in tree_iter(targets) if isinstance(x, HetTensor)]


@wraps(
    het_tensor.gather,
    assigned=("__name__", "__qualname__", "__doc__", "__annotations__"),
)
def gather(x: Tensor, *, images: bool = False) -> Tensor:
    """Gathers a HetTensor, as a call of its own in messages of errors."""
    call_tags.enter("hetconv.gather")
    return het_tensor.gather(x, images=images)


RUN: dict[type[Any], Runner] = {}
AGAIN: dict[type[Any], AgainMaker] = {}
for family in (as_called, extremes, norm_calls, pooling, view_calls):
    AGAIN |= family.AGAIN
    RUN |= family.RUN
RUN |= conv.RUN | resampling.RUN

register_dispatcher(dispatch)
register_patch(lambda: gather_for_functions(on_gathered))
