"""Random numbers on shards: each rank draws its own, or all draw the same.

Seeds are drawn from the state that the ranks share (`parallelize`). This state advances
alike on all of them, and where it is set again, by `torch.manual_seed` or by
checkpointing, the same numbers are drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hetconv.comm.rank_group import RankGroup
from hetconv.errors import HetConvError
from hetconv.operators.base import Call
from hetconv.operators.random import Dropout, NoiseLike
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs, Runner, as_called, to_layout
from hetconv.sharding.layer_rules import OpSharding

from .as_called import like


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


RUN: dict[type[Any], Runner] = {Dropout: dropout, NoiseLike: noise_like}
