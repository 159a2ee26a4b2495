"""Calls that run on shards, and operators whose local computation is the call itself.

These are elementwise functions, reductions, einsum and matrix products, new tensors, and
random functions. For the latter every rank draws its own random numbers or all ranks draw
the same ones, as the layout requires. The seeds come from the generator state that all
ranks share (see `parallelize`). This state advances alike on all ranks, so that the same
numbers are drawn again where it is restored by `torch.manual_seed` or by checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

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
from hetconv.runtime.inputs import Args, Func, Kwargs, to_layout
from hetconv.sharding.layout import Box, Layout
from hetconv.sharding.rule import OpSharding

NAN_IF_EMPTY = frozenset({"mean", "var", "std", "var_mean", "std_mean"})
"""Reductions for which torch warns, or returns NaN, if the input is empty."""


class ShardedCall(NamedTuple):
    """Call of a torch function that runs on shards.

    Attributes:
        call: The operator and its tensors, as read from the arguments.
        sharding: Layouts in which the operator reads its inputs and leaves its output.
        group: Ranks that hold the shards.
        func: The torch function that was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    call: Call
    sharding: OpSharding
    group: RankGroup
    func: Func
    args: Args
    kwargs: Kwargs

    @property
    def output(self) -> Layout:
        """Layout of the result."""
        return self.sharding.output

    @property
    def box(self) -> Box:
        """This rank's box of the result."""
        return self.output.boxes[self.group.rank]

    def local_inputs(self, start: int = 0) -> list[Tensor]:
        """Returns this rank's shard of the inputs from ``start`` on, as they are read."""
        pairs = [*zip(self.call.inputs, self.sharding.input_layouts, strict=True)]
        return [to_layout(x, layout, self.group) for x, layout in pairs[start:]]

    def local_input(self) -> Tensor:
        """Returns this rank's shard of the first input."""
        return to_layout(
            self.call.inputs[0], self.sharding.input_layouts[0], self.group
        )

    def on(self, x: Tensor) -> Any:
        """Returns the result of the same call with ``x`` as its first argument."""
        rest = {name: v for name, v in self.kwargs.items() if name != "input"}
        return self.func(x, *self.args[1:], **rest)

    def wrap(self, y: Tensor) -> HetTensor:
        """Wraps this rank's shard of the result."""
        return HetTensor.wrap(y, self.output, self.group)


Runner = Callable[[ShardedCall], HetTensor | tuple[HetTensor, ...]]
"""Runs a call on shards."""
Again = Callable[[Args, Kwargs], HetTensor | tuple[HetTensor, ...] | None]
"""Runs a call again, with other tensors; None if it has to be read anew."""
AgainMaker = Callable[[ShardedCall, bool], Again | None]
"""Returns what runs a call again on tensors of the same layouts, without reading it; None
if that cannot be. It is told whether the result shares memory by memory format.
"""


def called_on(
    local: Mapping[int, Tensor], func: Func, args: Args, kwargs: Kwargs
) -> Any:
    """Returns the result of a call in which some tensors are replaced.

    Args:
        local: The new tensors, by the id of the argument that each replaces.
        func: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    new_kwargs = {name: local.get(id(v), v) for name, v in kwargs.items()}
    return func(*(local.get(id(a), a) for a in args), **new_kwargs)


def _on_local_inputs(c: ShardedCall, local: list[Tensor]) -> Any:
    by_id = {id(x): shard for x, shard in zip(c.call.inputs, local, strict=True)}
    return called_on(by_id, c.func, c.args, c.kwargs)


def pointwise(c: ShardedCall) -> HetTensor:
    """Runs an elementwise function on the local shards."""
    return c.wrap(_on_local_inputs(c, c.local_inputs()))


def contraction(c: ShardedCall) -> HetTensor:
    """Runs einsum or a matrix product on the local shards.

    The shards are passed by position, because one tensor may be two inputs, of which
    different shards are read.
    """
    equation = c.args[:1] if c.args and isinstance(c.args[0], str) else ()
    return c.wrap(c.func(*equation, *c.local_inputs()))


def along_dim(c: ShardedCall) -> Any:
    """Runs a reduction, or a function along a dimension, on the local shard.

    If the reduced dimension is sharded, a mean is weighted by the shard's fraction of
    all elements, so that the partial results sum to the mean of the whole.
    """
    x, *_ = local = c.local_inputs()
    op, name = c.call.op, function_name(c.func)
    if isinstance(op, Reduction) and name in NAN_IF_EMPTY and not x.numel():
        dtype = c.kwargs.get("dtype") or x.dtype
        zero = x.sum(op.dims, keepdim=op.keepdim, dtype=dtype)
        y: Any = (zero, zero) if name.endswith("_mean") else zero
    else:
        y, share = _on_local_inputs(c, local), _share_of_mean(c, x)
        # Weighted after the mean: a half-precision sum may overflow.
        y = y if share is None else y * share
    return _wrapped(y, c.output, c.group)


def _share_of_mean(c: ShardedCall, x: Tensor) -> float | None:
    """Returns the weight of the mean of a shard ``x``, if the result is partial."""
    op, whole = c.call.op, c.call.inputs[0]
    if not isinstance(op, Reduction) or function_name(c.func) != "mean":
        return None
    if c.output.kind != "partial":
        return None
    own_count, count = (prod(t.shape[d] for d in op.dims) for t in (x, whole))
    return own_count / count


def _wrapped(y: Any, output: Layout, group: RankGroup) -> Any:
    """Wraps the local shard of a result, or of each in a named tuple of results."""
    if isinstance(y, Tensor):
        return HetTensor.wrap(y, output, group)
    return type(y)(tuple(HetTensor.wrap(t, output, group) for t in y))


def along_dim_again(c: ShardedCall, by_order: bool) -> Again | None:
    """Returns what runs the function on other shards, if nothing is to be moved."""
    (x, *others), output, group = c.call.inputs, c.output, c.group
    if others or c.call.in_place or by_order or not c.args or c.args[0] is not x:
        return None
    if not isinstance(x, HetTensor) or x.placement != c.sharding.input_layouts[0]:
        return None
    if not x.local.numel():
        return None
    func, share = c.func, _share_of_mean(c, x.local)

    def again(args: Args, kwargs: Kwargs) -> Any:
        y = func(args[0].local, *args[1:], **kwargs)
        return _wrapped(y if share is None else y * share, output, group)

    return again


def like(c: ShardedCall) -> HetTensor:
    """Runs a function such as ``zeros_like``, which reads only the form of its input.

    The local input is its shard, with its memory format, where that has the right
    shape, and else a new tensor of the result's local shape.
    """
    (x,), shape = c.call.inputs, c.box.shape
    assert isinstance(x, HetTensor)
    return c.wrap(c.on(x.local if x.local.shape == shape else x.local.new_empty(shape)))


def dropout(c: ShardedCall) -> HetTensor:
    """Runs dropout on the local shard, with the seed of the rank that the layout names."""
    op = c.call.op
    assert isinstance(op, Dropout)
    x = c.local_input()
    seed_ranks = [op.seed_rank(c.output, rank) for rank in range(c.group.size)]
    check_draws(c.group, c.func, seed_ranks)
    with _seeded(x.device, c.group, seed_ranks[c.group.rank]):
        return c.wrap(c.on(x))


def noise_like(c: ShardedCall) -> HetTensor:
    """Draws noise in the shape of the local shard, with this rank's own seed."""
    with _seeded(c.call.inputs[0].device, c.group, c.group.rank):
        return like(c)


def check_draws(group: RankGroup, func: Func, seed_ranks: Iterable[int]) -> None:
    """Checks that ranks that must draw the same random numbers can do so.

    Args:
        group: The ranks.
        func: The function that draws, for the message.
        seed_ranks: For each rank, the rank whose seed it uses.

    Raises:
        HetConvError: Ranks share a seed, but are devices of different kinds.
    """
    if not group.agreements.draws_alike and [*seed_ranks] != [*range(group.size)]:
        raise HetConvError(
            f"{func.__name__} draws random numbers for values that several ranks hold, and "
            "some compute on a CPU, "
            "others on a GPU, which draw different numbers; split the layer before it by "
            "height, width or sample, draw "
            "outside of the model, or give all ranks devices of one kind"
        )


@contextmanager
def _seeded(device: torch.device, group: RankGroup, seed_rank: int) -> Iterator[None]:
    """Seeds the device's generator with a rank's seed while the context lasts."""
    seeds = torch.randint(2**62, (group.size,), device="cpu").tolist()
    generator = (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )
    state = generator.get_state()
    generator.manual_seed(seeds[seed_rank])
    try:
        yield
    finally:
        generator.set_state(state)


RUN: dict[type[Any], Runner] = {
    AlongDim: along_dim,
    Contraction: contraction,
    Dropout: dropout,
    Like: like,
    NoiseLike: noise_like,
    Pointwise: pointwise,
    PRelu: pointwise,
    Reduction: along_dim,
}
AGAIN: dict[type[Any], AgainMaker] = {
    AlongDim: along_dim_again,
    Reduction: along_dim_again,
}
