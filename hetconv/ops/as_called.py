"""Operators whose local computation is the call itself.

They are elementwise functions, reductions, products, new tensors, dropout and noise.
Random numbers come from seeds that are drawn from the state that the ranks share
(`parallelize`). This state advances alike on all of them, and where it is set again, by
`torch.manual_seed` or by checkpointing, the same numbers are drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.errors import HetConvError
from hetconv.operators.base import Call, function_name
from hetconv.operators.einsum import Contraction
from hetconv.operators.elementwise import Pointwise, PRelu
from hetconv.operators.random import Dropout, Like, NoiseLike
from hetconv.operators.reductions import AlongDim, Reduction
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import (
    Args,
    Func,
    Kwargs,
    Runner,
    as_called,
    called_on,
    to_layout,
)
from hetconv.sharding.rule import OpSharding


def pointwise(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs an elementwise function on the shards of its inputs."""
    local = {
        id(x): to_layout(x, r, group)
        for x, r in zip(call.inputs, sharding.input_layouts, strict=True)
    }
    return HetTensor.wrap(called_on(local, func, args, kwargs), sharding.output, group)


def contracted(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs a matrix product or einsum on shards.

    One tensor may be two inputs, of which different shards are read.
    """
    parts = [
        to_layout(x, read, group)
        for x, read in zip(call.inputs, sharding.input_layouts, strict=True)
    ]
    equation = args[:1] if args and isinstance(args[0], str) else ()
    return HetTensor.wrap(func(*equation, *parts), sharding.output, group)


NAN_IF_EMPTY = frozenset({"mean", "var", "std", "var_mean", "std_mean"})
"""Of which torch warns, or gives NaN, where there are no numbers."""


def along_dim(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Runs a function along some dimensions on this rank's shard.

    Where the shard is a slice of the dimensions, a mean counts as the shard's share of all
    entries.
    """
    local = {
        id(x): to_layout(x, read, group)
        for x, read in zip(call.inputs, sharding.input_layouts, strict=True)
    }
    (x, *_), op, name = local.values(), call.op, function_name(func)
    if isinstance(op, Reduction) and name in NAN_IF_EMPTY and not x.numel():
        nothing = x.sum(
            op.dims, keepdim=op.keepdim, dtype=kwargs.get("dtype") or x.dtype
        )
        y: Any = (nothing, nothing) if name.endswith("_mean") else nothing
    else:
        y = called_on(local, func, args, kwargs)
        if (
            isinstance(op, Reduction)
            and name == "mean"
            and sharding.output.kind == "partial"
        ):
            own, whole = (
                prod(t.shape[d] for d in op.dims) for t in (x, call.inputs[0])
            )
            y = y * (
                own / whole
            )  # after it: a sum of half precision may be beyond its range
    if isinstance(y, Tensor):
        return HetTensor.wrap(y, sharding.output, group)
    return type(y)(
        tuple(HetTensor.wrap(each, sharding.output, group) for each in y)
    )  # a named tuple, as torch's


def like(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Makes a new tensor in the shape of another one."""
    return HetTensor.wrap(
        as_called(func, args, kwargs)(shown(call, sharding, group)),
        sharding.output,
        group,
    )


def shown(call: Call, sharding: OpSharding, group: RankGroup) -> Tensor:
    """Returns a tensor in the shape of this rank's shard of the result.

    It has the memory order of the input where that has this shape.
    """
    (x,), shape = call.inputs, sharding.output.boxes[group.rank].shape
    assert isinstance(x, HetTensor)
    return x.local if x.local.shape == shape else x.local.new_empty(shape)


def dropout(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Runs dropout on shards."""
    assert isinstance(call.op, Dropout)
    x = to_layout(call.inputs[0], sharding.input_layouts[0], group)
    check_draws(
        group,
        func,
        (call.op.seed_rank(sharding.output, rank) for rank in range(group.size)),
    )
    with _seeded(x.device, group, call.op.seed_rank(sharding.output, group.rank)):
        y = as_called(func, args, kwargs)(x)
    return HetTensor.wrap(y, sharding.output, group)


def noise_like(
    call: Call,
    sharding: OpSharding,
    group: RankGroup,
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> HetTensor:
    """Draws noise in the shape of another tensor."""
    with _seeded(call.inputs[0].device, group, group.rank):
        return like(call, sharding, group, func, args, kwargs)


def check_draws(group: RankGroup, func: Func, drawn_by: Iterable[int]) -> None:
    """Raises `HetConvError` where ranks would draw different numbers but must not.

    Args:
        group: the ranks.
        func: the function that draws.
        drawn_by: for each rank, the rank whose seed it uses.
    """
    if not group.agreements.draws_alike and [*drawn_by] != [*range(group.size)]:
        raise HetConvError(
            f"{func.__name__} draws random numbers for values that several ranks hold, and "
            "some compute on a CPU, "
            "others on a GPU, which draw different numbers; cut the layer before it by "
            "height, width or sample, draw "
            "outside of the model, or give all ranks devices of one kind"
        )


@contextmanager
def _seeded(device: torch.device, group: RankGroup, by: int) -> Iterator[None]:
    """Context in which the device's generator has the seed of rank ``by``."""
    seeds = torch.randint(2**62, (group.size,), device="cpu").tolist()
    generator = (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )
    state = generator.get_state()
    generator.manual_seed(seeds[by])
    try:
        yield
    finally:
        generator.set_state(state)


RUN: dict[type[Any], Runner] = {
    AlongDim: along_dim,
    Contraction: contracted,
    Like: like,
    Pointwise: pointwise,
    PRelu: pointwise,
    Reduction: along_dim,
    Dropout: dropout,
    NoiseLike: noise_like,
}
