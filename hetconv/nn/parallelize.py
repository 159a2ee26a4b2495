"""Replaces layers of a model by split layers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from hetconv import kernels
from hetconv.comm.consensus import validate_together
from hetconv.comm.rank_group import (
    RankGroup,
    all_gather_object,
    broadcast,
    rank_group_of,
    translate_backend_errors,
)
from hetconv.errors import HetConvError, PlanError
from hetconv.operators.layers import is_plain
from hetconv.ops.deferred import fusion_pays
from hetconv.schemas.plan import LayerPlan, Plan
from hetconv.schemas.tuning_results import TunedTile
from hetconv.sharding.layer_rules import Linear
from hetconv.sharding.split import Split
from hetconv.torch_internals import move_hooks

from .fast_modules import use_local_forwards
from .layers import HET_CONVS, HetLinear, minimal_op
from .model_call import ModelContext
from .split_layer import PlainConv, has_wire_format

Tiles = dict[
    tuple[str, str, str], dict[kernels.tiles.Problem, kernels.tiles.Entry]
]  # by device, torch and triton
_warned: set[str] = set()  # names of devices


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    fuse: bool = False,
    sync_every: int = 100,
    signatures: int = 128,
) -> nn.Module:
    """Replaces the layers that a plan names by split layers, in place. Collective.

    Parameter names stay. Rank 0's parameters and buffers are sent to all ranks. Afterwards
    every rank calls the model with the same plain input, and gets the same plain output.

    Args:
        model: the plain model, alike on every rank.
        plan: splits of its layers. Kernels use its tiles where these were tuned on a GPU of
            this rank's name with the versions in use; otherwise a warning says so once.
        group: the ranks; None for all.
        fuse: whether, without autograd, a split convolution computes the batch norm in
            evaluation, the residual and the activation that follow it in its epilogue. Results
            are the same up to rounding. Convolutions that ATen computes are not fused, as
            that would take longer.
        sync_every: number of forwards in training after which `sync_replicated` compares the
            replicas; 0 for never.
        signatures: number of sets of input shapes, dtypes and modes for which the model
            keeps how its operators run. The least recently used one is dropped. Each takes a
            few tenths of a megabyte.

    Returns:
        The model, or the split layer if the model itself is one layer.

    Raises:
        PlanError: the plan does not fit the model or the number of ranks; on every rank,
            before anything changes.
        DisagreementError: ranks have different plans, models or options; on every rank.
    """
    rank_group = rank_group_of(group)

    options = f"fuse {fuse}, sync_every {sync_every}, signatures {signatures}"
    found, tiles = validate_together(
        rank_group,
        "parallelize",
        lambda: _checked(model, plan, rank_group.size, signatures),
        lambda _: f"plan {plan.digest}, {options}, model {_signature(model)}",
    )
    devices = {p.device for p in model.parameters()}
    for device in devices:
        _install(tiles, device)
    fuse = fuse and fusion_pays(rank_group)
    broadcast(rank_group, [t.data for t in (*model.parameters(), *model.buffers())])
    _share_random_state(rank_group, model)
    model = _swap(model, found, plan, rank_group, fuse)
    use_local_forwards(model)
    ModelContext(model, rank_group, sync_every, signatures).attach()
    return model


def _checked(
    model: nn.Module, plan: Plan, world: int, signatures: int
) -> tuple[dict[str, nn.Module], Tiles]:
    """Returns the layers and tiles that the plan names, or raises this rank's error."""
    if signatures < 1:
        raise HetConvError(
            f"signatures is {signatures}, but the current one must be remembered; give 1 or more"
        )
    if plan.world != world:
        raise PlanError(
            f"the plan is for {plan.world} ranks, but this group has {world}; make one for them"
        )
    layers = dict(model.named_modules(remove_duplicate=False))
    _check_modules(layers)
    found = {
        name: _checked_layer(layers, name, split, world)
        for name, split in plan.splits.items()
    }
    _check_sharing(layers, found, plan.splits)
    return found, _by_origin(plan.tiles)


def _swap(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    plan: Plan,
    group: RankGroup,
    fuse: bool,
) -> nn.Module:
    """Puts split layers in the place of plain ones, and returns the model."""
    swapped: dict[int, nn.Module] = {}
    for name, layer in found.items():
        if id(layer) not in swapped:
            swapped[id(layer)] = _swapped(layer, plan.layers[name], group, fuse)
            move_hooks(layer, swapped[id(layer)])
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        parent, _, child = path.rpartition(".")
        if id(layer) in swapped and path:
            setattr(model.get_submodule(parent), child, swapped[id(layer)])
    return swapped.get(id(model), model)


def _check_modules(layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if any(
            map(
                nn.parameter.is_lazy,
                (*layer.parameters(recurse=False), *layer.buffers(recurse=False)),
            )
        ):
            raise PlanError(
                f"layer {name!r} is a {type(layer).__name__} whose parameters have no shapes "
                "yet; call the model once "
                f"before hetconv.parallelize"
            )
        if isinstance(layer, nn.SyncBatchNorm):
            raise PlanError(
                f"layer {name!r} is a SyncBatchNorm, which would count the batch once per "
                "rank; leave "
                "convert_sync_batchnorm out: batch norm on parts has the statistics of the "
                "whole batch"
            )


def _checked_layer(
    layers: Mapping[str, nn.Module], name: str, split: Split, world: int
) -> nn.Module:
    layer = layers.get(name)
    if isinstance(layer, (PlainConv, nn.Linear)) and not is_plain(layer):
        raise PlanError(
            f"layer {name!r} is a {type(layer).__name__} that computes or keeps its weight in "
            "a way of its own; "
            f"leave it out of the plan"
        )
    if isinstance(layer, PlainConv):
        minimal_op(layer).check(split, world)
    elif isinstance(layer, nn.Linear):
        Linear((1, 1, 1, 1, layer.in_features), layer.out_features).check(split, world)
    else:
        have = f"a {type(layer).__name__}" if layer is not None else "no such module"
        raise PlanError(
            f"the plan splits {name!r}, but the model has {have} there; make the plan from "
            "this model"
        )
    return layer


def _check_sharing(
    layers: Mapping[str, nn.Module],
    found: Mapping[str, nn.Module],
    splits: Mapping[str, Split],
) -> None:
    """Refuses different splits of one layer, and split layers that share a parameter."""
    planned = {id(layer): name for name, layer in found.items()}
    for name, layer in found.items():
        first = planned[id(layer)]
        if splits[name] != splits[first]:
            raise PlanError(
                f"the plan splits one layer in two ways, as {name!r} and as {first!r}; give "
                "both the same split"
            )
    owners: dict[int, nn.Module] = {}
    for name, layer in layers.items():
        for p in layer.parameters(recurse=False):
            other = owners.setdefault(id(p), layer)
            if other is not layer and (id(other) in planned or id(layer) in planned):
                raise PlanError(
                    f"layer {name!r} shares a parameter with another layer; leave both out of "
                    "the plan"
                )


def _signature(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = ", ".join(
        f"{k}{tuple(v.shape)}{v.dtype}{' channels-last' * has_wire_format(v)}"
        for k, v in tensors
    )
    return f"{type(model).__name__}({shapes})"


def _swapped(
    layer: nn.Module, planned: LayerPlan, group: RankGroup, fuse: bool
) -> nn.Module:
    if isinstance(layer, PlainConv):
        made = HET_CONVS[len(layer.kernel_size) - 1]._local(
            layer, planned.split, group, "split"
        )
        made.fusible, made.chunks = planned.fusible if fuse else (), planned.chunks
        return made
    assert isinstance(layer, nn.Linear)
    return HetLinear(layer, planned.split, group)


def _share_random_state(group: RankGroup, model: nn.Module) -> None:
    """Gives all ranks the random state of the first, for operators on replicated values."""
    state = torch.get_rng_state()
    translate_backend_errors(
        group, partial(dist.broadcast, state, group=group.control, group_src=0)
    )
    torch.set_rng_state(state)
    on_cuda = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    )
    states = all_gather_object(
        group, [torch.cuda.get_rng_state(index) for index in on_cuda]
    )
    first = next((of_rank[0] for of_rank in states if of_rank), None)
    for index in on_cuda:
        assert first is not None
        torch.cuda.set_rng_state(first, index)
    group.agreements.draws_alike = first is None or all(states)


def _by_origin(tiles: Sequence[TunedTile]) -> Tiles:
    """Groups tiles by device and versions. Raises `KernelError` for an unknown tile."""
    found: Tiles = {}
    for t in tiles:
        choice: kernels.tiles.Entry = (
            "aten" if t.choice == "aten" else kernels.Tile.parse(t.choice)
        )
        found.setdefault((t.device, t.torch, t.triton), {})[
            t.what, t.spec, t.precision
        ] = choice
    return found


def _install(tiles: Tiles, device: torch.device) -> None:
    """Installs the tiles that were tuned on a device of this name.

    Warns if there are others only.
    """
    if not tiles or kernels.dispatch.obstacle(device) is not None:
        return
    here = (kernels.dispatch.device_name(device), *kernels.tiles.versions_in_use())
    if here in tiles:
        kernels.tiles.install(tiles[here], here[0], here[1:])
    elif here[0] not in _warned:
        _warned.add(here[0])
        there = "; ".join(_origin(*origin) for origin in sorted(tiles))
        warnings.warn(
            f"the plan's tiles were tuned on {there}, and this is {_origin(*here)}: they are "
            "left out. "
            "Run `hetconv autotune` and `hetconv plan` here",
            stacklevel=3,
        )


def _origin(device: str, torch_: str, triton: str) -> str:
    return f"{device} with torch {torch_} and triton {triton}"
