"""Moves a parallelized model, with its gradients and optimizer state, to another plan.

Parameters remain the same objects, so that optimizers, hooks and data-parallel wrappers
keep them. All new slices are built beside the old ones; only after all ranks have
them does any rank switch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hetconv.comm.consensus import assert_consensus, validate_together
from hetconv.comm.rank_group import RankGroup, rank_group_of
from hetconv.errors import HetConvError, PlanError
from hetconv.nn.layers import minimal_op
from hetconv.nn.optimizer_state import sharded_optim_state_dict
from hetconv.nn.parallelize import (
    Tiles,
    check_one_split_each,
    install_tiles,
    tiles_by_origin,
)
from hetconv.nn.parameters import required_group
from hetconv.nn.split_layer import SplitLayer
from hetconv.schemas.plan import Plan
from hetconv.sharding.param_shards import ParamShards
from hetconv.torch_internals import rebuild_buckets

from .shard_moves import ShardMove, Switch, described, moved, reserve_memory

WRAPPED = "module", "_orig_mod"
"""Where wrappers keep the model: those of data parallelism and averages, and compiled ones."""


@torch.no_grad()
def apply_plan(
    model: nn.Module,
    optimizer: Optimizer | None,
    plan: Plan,
    *,
    copies: Sequence[nn.Module] = (),
) -> None:
    """Changes the plan of a parallelized model, in place; collective.

    Parameters, their gradients and the optimizer's state move between ranks; whole
    values keep their bits. Call it between two steps. It needs memory for the new
    slices beside the old ones.

    Args:
        model: The parallelized model. If it is wrapped in `DistributedDataParallel`, the
            wrapper; all replicas then change to the same plan.
        optimizer: Its optimizer; None if there is none.
        plan: The new plan, of the same layers.
        copies: Copies of the model that change with it, such as an
            `torch.optim.swa_utils.AveragedModel`.

    Raises:
        PlanError: On every rank, before anything changes, if the plan does not fit the
            model or the number of ranks.
        HetConvError: Likewise, if the optimizer's state cannot be moved, or if a rank
            lacks the memory.
        DisagreementError: On every rank, if ranks were given different plans.
        LostRankError: Another rank is gone. The model then has either plan, on each rank
            that is left, and the last checkpoint loads.

    Examples:
        >>> slowed = profile.slowed([1.0, 2.5])  # the second GPU has another job
        >>> hetconv.apply_plan(model, optimizer, hetconv.make_plan(graph, slowed))
    """
    group, what = required_group(model), "apply_plan"

    def check() -> tuple[list[_Change], Tiles]:
        if optimizer is not None:
            sharded_optim_state_dict(model, optimizer)  # raises for what cannot move
        _refuse_hidden_wrapper(model)
        found = [c for m in (model, *copies) for c in _changes(m, plan, group)]
        return found, tiles_by_origin(plan.tiles)

    def agreed(_: object) -> str:
        return f"plan {plan.digest}, copies {len(copies)}"

    changes, tiles = validate_together(group, what, check, agreed)
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    for wrapper in wrappers:
        assert_consensus(rank_group_of(wrapper.process_group), what, agreed(None))
    moves = [move for change in changes for move in _moves(change, optimizer)]
    for switch in _moved_together(group, what, moves):
        switch()
    for change in changes:
        change.layer.adopt_split(plan.layers[change.name], change.held)
    for context in {change.layer.context for change in changes} - {None}:
        context.forget_calls()
    for wrapper in wrappers if moves else ():
        rebuild_buckets(wrapper)
    for device in {p.device for p in model.parameters()}:
        install_tiles(tiles, device)


def _moved_together(
    group: RankGroup, what: str, moves: Sequence[ShardMove]
) -> list[Switch]:
    """Returns what installs the new slices, once all ranks have theirs; collective."""
    known = described(group, what, moves)
    validate_together(group, what, lambda: reserve_memory(group, moves, known), str)
    switches = [
        moved(group, move, kept) for move, kept in zip(moves, known, strict=True)
    ]
    assert_consensus(group, what, f"{len(switches)} parameters moved")
    return switches


class _Change(NamedTuple):
    """A layer whose split changes.

    Attributes:
        name: Name of the layer in the plan.
        layer: The layer.
        held: Which ranks will hold what of each parameter.
    """

    name: str
    layer: SplitLayer
    held: Mapping[str, ParamShards]


def _changes(model: nn.Module, plan: Plan, group: RankGroup) -> Iterator[_Change]:
    """Lists the layers that change, or raises `PlanError`."""
    if plan.world != group.size:
        raise PlanError(
            f"the plan is for {plan.world} ranks, but the model is on {group.size}; make one "
            "for them"
        )
    layers = _layers_of(model, plan)
    missing, unknown = (
        sorted(layers.keys() - plan.layers),
        sorted(plan.layers.keys() - layers.keys()),
    )
    if missing or unknown:
        raise PlanError(
            f"the plan does not fit the split layers of the model: missing {missing}, "
            f"unknown {unknown}; make it from the model that was parallelized"
        )
    check_one_split_each(layers, plan.splits)
    names = {layer: name for name, layer in layers.items()}
    for layer, name in names.items():
        planned = plan.layers[name]
        op = minimal_op(layer)
        op.check(planned.split, group.size)
        if not layer.follows(planned):
            yield _Change(name, layer, op.param_shards(planned.split, group.size))


def _layers_of(model: nn.Module, plan: Plan) -> dict[str, SplitLayer]:
    """Returns the split layers by the names that they have in a plan."""
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, SplitLayer)
    }
    if layers.keys() != plan.layers.keys():
        for name in WRAPPED:
            if isinstance(inner := getattr(model, name, None), nn.Module):
                return _layers_of(inner, plan) or layers
    return layers


def _moves(change: _Change, optimizer: Optimizer | None) -> Iterator[ShardMove]:
    layer = change.layer
    for name, old in layer.held.items():
        new, channels_last = change.held[name], layer.as_wired and name == "weight"
        if old.boxes != new.boxes:
            param = layer.parameter_slice(name)
            yield ShardMove(param, old, new, channels_last, optimizer)


def _refuse_hidden_wrapper(model: nn.Module) -> None:
    """Raises `HetConvError` if the caller's model is within a data-parallel wrapper.

    The wrapper keeps buffers of the gradients' shapes, which only it can change.
    """
    ours = set(model.modules())
    if not _wrappers_of(ours):
        return
    gc.collect()  # a wrapper that was deleted no longer counts
    if _wrappers_of(ours):
        raise HetConvError(
            "the model is wrapped in DistributedDataParallel, which keeps the shapes of "
            "its gradients; give apply_plan the wrapper instead of the model within"
        )


def _wrappers_of(modules: set[nn.Module]) -> list[DistributedDataParallel]:
    """Returns the data-parallel wrappers of some of these modules that are not among them."""
    return [
        wrapper
        for wrapper in gc.get_referrers(DistributedDataParallel)
        if isinstance(wrapper, DistributedDataParallel)
        and wrapper not in modules
        and not modules.isdisjoint(wrapper.modules())
    ]
