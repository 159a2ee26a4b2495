"""Cache of calls that need no communication.

The same call again runs on the local shards without being read anew. Most operators
between the convolutions of a CNN are of this kind, and reading a call takes longer than
a small operator does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.operators.elementwise import Pointwise
from hetconv.operators.norms import BatchNorm
from hetconv.runtime.het_tensor import HetTensor, compute_deferred
from hetconv.runtime.inputs import Args, Func, Kwargs
from hetconv.sharding.layout import Box, Layout, ReadRegion
from hetconv.signature_cache import Cache

from . import views
from .as_called import Again, ShardedCall

PLAIN = {
    bool,
    float,
    int,
    str,
    type(None),
    type(...),
    torch.device,
    torch.dtype,
    torch.memory_format,
}
SEQUENCES = {tuple, list, torch.Size}


class Key(NamedTuple):
    """Signature of a call: all that decides whether it needs communication.

    Attributes:
        signature: The function and the properties of its arguments.
        layouts: The layouts of HetTensors among the arguments, kept alive by it, because
            their ids are part of the signature.
        nested: The layouts of HetTensors in sequences among the arguments, likewise.
    """

    signature: tuple[Any, ...]
    layouts: list[Layout]
    nested: list[Layout]


class _Known(NamedTuple):
    """How a call runs.

    Attributes:
        run: Computes the local shard of the result from the call's local arguments.
        output: Layout of the result.
        in_place: Whether the call writes to its first argument.
        again: What runs the call instead, if it is given.
        layouts: The layouts whose ids are part of the signature.
    """

    run: Func | None
    output: Layout | None
    in_place: bool
    again: Again | None
    layouts: list[Layout]


_known: Cache[tuple[Any, ...], _Known] = Cache()


def lookup(
    func: Func, args: Args, kwargs: Kwargs
) -> HetTensor | tuple[HetTensor, ...] | Key | None:
    """Looks a call up, and runs it if it is stored.

    Returns:
        The result of a call that is stored; else the key to store it under, or None for
        a call that can never be stored.
    """
    graded = torch.is_grad_enabled()
    key: list[Any] = [func, graded]
    local: list[Any] = []
    nested: list[Layout] = []
    for a in args:
        if a.__class__ is HetTensor:
            if a.pending is not None:
                return None
            key.append(id(a.placement))
            group, a = a.group, a._local
            key.append(a.dtype)
        elif a.__class__ in PLAIN:
            key.append((a,))
        elif isinstance(a, Tensor):
            key.append((a.shape, a.requires_grad) if graded else a.shape)
        elif not _sign_sequence(a, key, nested):
            return None
        local.append(a)
    for name, a in kwargs.items():
        key.append(name)
        if a.__class__ in PLAIN:
            key.append(a)
        elif isinstance(a, Tensor) and a.__class__ is not HetTensor:
            key.append((a.shape, a.requires_grad) if graded else a.shape)
        elif not _sign_sequence(a, key, nested):
            return None
    signature = tuple(key)
    known = _known.current.get(signature)
    if known is not None and known.again is not None:
        if (found := known.again(args, kwargs)) is not None:
            return found
        known = None
    if known is None:
        layouts = [a.placement for a in args if a.__class__ is HetTensor]
        return Key(signature, layouts, nested)
    assert known.run is not None
    assert known.output is not None
    target: HetTensor | None = args[0] if known.in_place else None
    if target is not None:
        if not views.may_write(target, known.output):
            return None
        compute_deferred(target)
    y = known.run(*local, **kwargs)
    if target is None:
        return HetTensor.made(y, known.output, group)
    target.local = y
    return target


def _sign_sequence(a: Any, key: list[Any], nested: list[Layout]) -> bool:
    """Adds a sequence or a slice to a signature; returns whether all its items have one.

    Args:
        a: An argument.
        key: The signature.
        nested: Layouts of the HetTensors in sequences.
    """
    kind = a.__class__
    if kind is slice:
        a = (a.start, a.stop, a.step)
    elif kind not in SEQUENCES:
        return False
    key.append((kind, len(a)))
    for item in a:
        if item.__class__ in PLAIN:
            key.append((item,))
        elif item.__class__ is HetTensor:
            if item.pending is not None:
                return False
            key += (id(item.placement), item._local.dtype)
            nested.append(item.placement)
        elif not _sign_sequence(item, key, nested):
            return False
    return True


def store(key: Key, c: ShardedCall) -> None:
    """Stores a call that just ran on shards, if it can run without communication.

    It can if no input moved, and if the local computation is the call itself.

    Args:
        key: What `lookup` returned for the call.
        c: The call.
    """
    call, op, output = c.call, c.call.op, c.output
    alone = output.world == 1  # no other rank contributes to gradients
    if isinstance(op, BatchNorm):
        statistics_are_local = not op.training and output.inner_dim != 1
        runs_as_called = alone or (statistics_are_local and c.box.numel)
    else:
        runs_as_called = isinstance(op, Pointwise)
    # Layouts before the call, which in place may have changed them.
    given = [id(x) for x in c.args if isinstance(x, HetTensor)]
    before = dict(zip(given, key.layouts, strict=True))
    moves_target = call.in_place and before.get(id(call.inputs[0])) != output
    if not runs_as_called or moves_target:
        return
    if any(map(_wants_gradient, call.params)) and not alone:
        return
    reads = zip(call.inputs, c.sharding.input_layouts, strict=True)
    if all(_stays(x, before.get(id(x)), read, alone) for x, read in reads):
        run = DIRECT.get(c.func, c.func)
        known = _Known(run, output, call.in_place, None, key.layouts)
        _known.add(key.signature, known)


def store_again(key: Key, again: Again) -> None:
    """Stores what runs a call again.

    Args:
        key: What `lookup` returned for the call.
        again: Runs the call.
    """
    layouts = [*key.layouts, *key.nested]
    _known.add(key.signature, _Known(None, None, False, again, layouts))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Runs `torch.nn.functional.batch_norm` without its check of the batch size.

    The check is made when a call is read.
    """
    cudnn = torch.backends.cudnn.enabled
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn
    )


DIRECT: dict[Func, Func] = {F.batch_norm: _batch_norm}
"""What runs in the place of torch's Python functions for a call that is stored."""


def _stays(
    x: Tensor, layout: Layout | None, read: Layout | ReadRegion, alone: bool
) -> bool:
    """Returns whether an input is read as it is; ``layout`` is that of a HetTensor."""
    if layout is not None:
        return layout == read
    if _wants_gradient(x) and not alone:
        return False
    return all(box == Box.whole(read.shape) for box in read.boxes)


def _wants_gradient(x: Tensor) -> bool:
    """Returns whether a plain tensor has a gradient, which ranks must sum."""
    return torch.is_grad_enabled() and x.requires_grad
