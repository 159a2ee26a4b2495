"""Moves a parallelized model, with its gradients and optimizer state, to another plan.

Parameters remain the same objects, so that optimizers, hooks and data-parallel wrappers
keep them. All new slices are built beside the old ones; only after all ranks have
them does any rank switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hetconv import kernels
from hetconv.comm import call_tags
from hetconv.comm.consensus import validate_together
from hetconv.comm.exchange_plan import local_slice
from hetconv.comm.rank_group import RankGroup, all_gather_object
from hetconv.comm.redistribute import clone_if_aliased, sum_overlaps
from hetconv.errors import PlanError
from hetconv.nn.layers import minimal_op
from hetconv.nn.optimizer_state import sharded_optim_state_dict
from hetconv.nn.parallelize import check_one_split_each
from hetconv.nn.parameters import required_group
from hetconv.nn.split_layer import SplitLayer
from hetconv.schemas.plan import Plan
from hetconv.sharding.param_shards import ParamShards

Switch = Callable[[], None]
GRADIENT = "gradient"  # beside the keys of the optimizer's state


@torch.no_grad()
def apply_plan(model: nn.Module, optimizer: Optimizer | None, plan: Plan) -> None:
    """Changes the plan of a parallelized model, in place; collective.

    Parameters, their gradients and the optimizer's state move between ranks; whole
    values keep their bits. Call it between two steps, while no graph of autograd
    refers to the parameters.

    Args:
        model: The parallelized model.
        optimizer: Its optimizer; None if there is none.
        plan: The new plan, of the same layers.

    Raises:
        PlanError: On every rank, before anything changes, if the plan does not fit the
            model or the number of ranks.
        HetConvError: Likewise, if the optimizer's state cannot be moved.
        DisagreementError: On every rank, if ranks were given different plans.
    """
    group = required_group(model)

    def check() -> list[_Change]:
        if optimizer is not None:
            sharded_optim_state_dict(model, optimizer)  # raises for what cannot move
        return list(_changes(model, plan, group))

    changes = validate_together(
        group, "apply_plan", check, lambda _: f"plan {plan.digest}"
    )
    switches = [
        switch
        for change in changes
        for switch in _parameter_switches(group, change, optimizer)
    ]
    # No rank switches before all have their slices.
    validate_together(group, "apply_plan", lambda: switches, lambda s: str(len(s)))
    for switch in switches:
        switch()
    for change in changes:
        change.layer.adopt_split(plan.layers[change.name], change.held)
    for context in {change.layer.context for change in changes} - {None}:
        context.forget_calls()


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
    """Lists the layers whose split changes, or raises `PlanError`."""
    if plan.world != group.size:
        raise PlanError(
            f"the plan is for {plan.world} ranks, but the model is on {group.size}; make one "
            "for them"
        )
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, SplitLayer)
    }
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
        split = plan.splits[name]
        if split != layer.split:
            op = minimal_op(layer)
            op.check(split, group.size)
            yield _Change(name, layer, op.param_shards(split, group.size))


def _parameter_switches(
    group: RankGroup, change: _Change, optimizer: Optimizer | None
) -> Iterator[Switch]:
    """Builds the new slices of a layer's parameters, and yields what installs each."""
    layer = change.layer
    for name, old in layer.held.items():
        param, new = layer._slice(name), change.held[name]
        if old.boxes == new.boxes:
            continue
        call_tags.enter("apply_plan")
        move = partial(_moved, group, old, new, layer.as_wired and name == "weight")
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        kept = {GRADIENT: param.grad} if param.grad is not None else {}
        kept |= state
        described = {key: _described(x) for key, x in kept.items()}
        # A rank with an empty slice may have neither a gradient nor a state.
        known: dict[Any, _Described] = {}
        for of_rank in all_gather_object(group, described):
            for key, x in of_rank.items():
                known.setdefault(key, x)
        values: dict[Any, Any] = {}
        for key in known:
            if (dtype := known[key].dtype) is None:
                values[key] = kept.get(key, known[key].value)
                continue
            own = kept.get(key)
            if own is None:
                own = torch.zeros_like(param, dtype=dtype)
            values[key] = move(own)
        yield partial(_install, param, move(param.data), values, optimizer)


class _Described(NamedTuple):
    """What belongs to a parameter: the dtype of what is sliced like it, or a value."""

    dtype: torch.dtype | None
    value: Any


def _described(x: Any) -> _Described:
    if isinstance(x, Tensor) and x.dim():
        return _Described(x.dtype, None)
    return _Described(None, x)


def _moved(
    group: RankGroup,
    old: ParamShards,
    new: ParamShards,
    channels_last: bool,
    local: Tensor,
) -> Tensor:
    """Returns this rank's new slice of a tensor, in memory of its own; collective."""
    rank, primary = group.rank, old.primary.boxes
    owned = local_slice(local.detach(), old.boxes[rank], primary[rank])
    slice_ = clone_if_aliased(sum_overlaps(group, owned, primary, new.boxes), local)
    memory = torch.contiguous_format
    if channels_last:
        memory = kernels.CHANNELS_LAST[local.dim()]
    return slice_.contiguous(memory_format=memory)


def _install(
    param: nn.Parameter,
    data: Tensor,
    values: dict[str, Any],
    optimizer: Optimizer | None,
) -> None:
    """Gives a parameter, its gradient and its optimizer state their new slices."""
    grad = values.pop(GRADIENT, None)
    param.grad = None
    param.data = data
    param.grad = grad
    if optimizer is not None and values:
        optimizer.state[param] = values
