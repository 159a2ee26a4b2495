"""Cache of calls for which nothing is sent.

Such a call runs on local shards without being read again. Most calls between the
convolutions of a CNN are of this kind, and reading a call takes longer than a small one
does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.operators.base import Call
from hetconv.operators.elementwise import Pointwise
from hetconv.operators.norms import BatchNorm
from hetconv.runtime.het_tensor import HetTensor, compute_deferred
from hetconv.runtime.inputs import Args, Func, Kwargs
from hetconv.sharding.layout import Box, Layout, ReadRegion
from hetconv.sharding.rule import OpSharding
from hetconv.signature_cache import Cache

from . import views

PLAIN = {
    bool,
    float,
    int,
    str,
    type(None),
    torch.device,
    torch.dtype,
    torch.memory_format,
}


class Key(NamedTuple):
    """All that decides whether something is sent for a call.

    Attributes:
        said: function, arguments, and ids of layouts.
        held: the layouts, so that their ids stay valid.
    """

    said: tuple[Any, ...]
    held: list[Layout]


class _Known(NamedTuple):
    run: Func
    output: Layout
    in_place: bool
    held: list[Layout]


_known: Cache[tuple[Any, ...], _Known] = Cache()


def lookup(func: Func, args: Args, kwargs: Kwargs) -> HetTensor | Key | None:
    """Runs a call that is in the cache.

    Returns:
        Its result; or the key to store it by; or None for a call that is never cached.
    """
    graded = torch.is_grad_enabled()
    key: list[Any] = [func, graded]
    local = []
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
        else:
            return None
        local.append(a)
    for name, a in kwargs.items():
        key.append(name)
        if a.__class__ in PLAIN:
            key.append(a)
        elif isinstance(a, Tensor) and a.__class__ is not HetTensor:
            key.append((a.shape, a.requires_grad) if graded else a.shape)
        else:
            return None
    said = tuple(key)
    known = _known.current.get(said)
    if known is None:
        return Key(said, [a.placement for a in args if a.__class__ is HetTensor])
    target: HetTensor | None = args[0] if known.in_place else None
    if target is not None:
        if not views.may_write(target, known.output):
            return None
        compute_deferred()
    y = known.run(*local, **kwargs)
    if target is None:
        return HetTensor.made(y, known.output, group)
    target.local = y
    return target


def store(key: Key, call: Call, sharding: OpSharding, rank: int, args: Args) -> None:
    """Stores a call that just ran, if nothing was sent and it is the same call on shards.

    Args:
        key: from `lookup`.
        call: the call as it was read.
        sharding: how it ran.
        rank: this rank.
        args: the arguments.
    """
    op, output = call.op, sharding.output
    given = [id(x) for x in args if isinstance(x, HetTensor)]
    lone = output.world == 1  # to whose part nobody contributes
    as_called = isinstance(op, Pointwise) or (
        isinstance(op, BatchNorm)
        and (
            lone
            or (not op.training and output.inner_dim != 1 and output.boxes[rank].numel)
        )
    )
    placed = dict(
        zip(given, key.held, strict=True)
    )  # before the call, which in place may have changed it
    changes = call.in_place and placed.get(id(call.inputs[0])) != output
    if (
        not as_called
        or changes
        or (any(map(_wants_gradient, call.params)) and not lone)
    ):
        return
    if all(
        _stays(x, placed.get(id(x)), read, lone)
        for x, read in zip(call.inputs, sharding.input_layouts, strict=True)
    ):
        run = DIRECT.get(key.said[0], key.said[0])
        _known.add(key.said, _Known(run, output, call.in_place, key.held))


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

    Reading the call made that check.
    """
    cudnn = torch.backends.cudnn.enabled
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn
    )


DIRECT: dict[Func, Func] = {F.batch_norm: _batch_norm}
"""What torch's Python functions come to, once it is known that the call is one of parts."""


def _stays(
    x: Tensor, placed: Layout | None, read: Layout | ReadRegion, lone: bool
) -> bool:
    if placed is not None:
        return placed == read
    return (lone or not _wants_gradient(x)) and all(
        box == Box.whole(read.shape) for box in read.boxes
    )


def _wants_gradient(x: Tensor) -> bool:
    """Returns whether the ranks' contributions to a gradient are summed."""
    return torch.is_grad_enabled() and x.requires_grad
