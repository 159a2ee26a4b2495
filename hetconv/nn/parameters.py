"""Split layers of a model, and which ranks hold what of its parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hetconv.comm.rank_group import RankGroup
from hetconv.errors import HetConvError
from hetconv.sharding.param_shards import ParamShards

from .split_layer import SplitLayer

NOT_PARALLELIZED = (
    "the model has no split layer; call hetconv.parallelize(model, plan) first"
)


def split_layers(model: nn.Module) -> list[SplitLayer]:
    """Returns the split layers of a model."""
    return [layer for layer in model.modules() if isinstance(layer, SplitLayer)]


def sharded_parameters(model: nn.Module) -> dict[int, ParamShards]:
    """Returns the shards of parameters that are not whole on every rank, by id."""
    return parameters_of(model).shards


class Parameters(NamedTuple):
    """Parameters of a model.

    Attributes:
        every: Every parameter once.
        shards: Which ranks hold what of those that are not whole on every rank, by id.
        as_wired: Ids of those whose gradients are sent channels-last.
    """

    every: list[nn.Parameter]
    shards: dict[int, ParamShards]
    as_wired: set[int]


def parameters_of(model: nn.Module) -> Parameters:
    """Returns the parameters of a model."""
    params: dict[int, nn.Parameter] = {}
    held: dict[int, ParamShards] = {}
    as_wired: set[int] = set()
    for module in model.modules():
        # dict.values gives slices even while checkpointing recomputes a region, in which
        # parameters are read whole.
        params |= {id(p): p for p in dict.values(module._parameters) if p is not None}
        if isinstance(module, SplitLayer):
            held |= {
                id(module._parameters[name]): of
                for name, of in module.held.items()
                if not of.is_replicated
            }
            as_wired |= {id(module._parameters["weight"])} if module.as_wired else set()
    return Parameters([*params.values()], held, as_wired)


def group_of_model(model: nn.Module) -> RankGroup | None:
    """Returns the ranks that a model is parallelized over, or None.

    Raises:
        HetConvError: Its layers are split over several process groups.
    """
    groups = {layer.group for layer in split_layers(model)}
    if len(groups) > 1:
        raise HetConvError(
            "the layers of this model are split over several process groups; call this for each "
            "of them"
        )
    return groups.pop() if groups else None


def required_group(model: nn.Module) -> RankGroup:
    """Returns the ranks that a model is parallelized over.

    Raises:
        HetConvError: It is not parallelized, or over several process groups.
    """
    group = group_of_model(model)
    if group is None:
        raise HetConvError(NOT_PARALLELIZED)
    return group
