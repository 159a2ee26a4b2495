"""The function `parallelize`, which replaces the layers of a model by split layers."""

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
from hetconv.kernels import is_channels_last
from hetconv.operators.layers import is_plain
from hetconv.ops.deferred import fusion_pays
from hetconv.schemas.plan import LayerPlan, Plan
from hetconv.schemas.tuning_results import TunedTile
from hetconv.sharding.split import Split
from hetconv.torch_internals import move_hooks

from .fast_modules import use_local_forwards
from .layers import HET_CONVS, HetLinear, PlainConv, minimal_op
from .model_call import ModelContext
from .step_graphs import cuda_graphs

Tiles = dict[tuple[str, str, str], dict[kernels.tiles.Problem, kernels.tiles.Entry]]
"""Tuned tiles by device name, version of torch and version of Triton."""
_warned_devices: set[str] = set()


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    fuse: bool = False,
    graphs: bool = False,
    sync_every: int = 100,
    signatures: int = 128,
) -> nn.Module:
    """Replaces the layers that a plan names by split layers, in place; collective.

    All ranks get rank 0's parameters and buffers. Afterwards every rank calls the model
    with the same plain input and gets the same plain output.

    Args:
        model: The plain model, the same on every rank.
        plan: How its layers are split. Its tuned tiles are used if they were tuned on a
            GPU of this rank's name with the versions in use; else a warning is given,
            once.
        group: The ranks; all of them by default.
        fuse: Whether, without autograd, a split convolution also computes the batch
            norm, the residual and the activation that follow it according to the plan.
            Results are the same up to rounding. Convolutions that ATen computes are not
            fused, because that is slower.
        graphs: Whether, after two calls with one signature (shapes and modes of inputs,
            modes of the model), the forward and in training its backward are captured
            in CUDA graphs, with their messages, and replayed from then on. It needs
            GPUs, and NCCL between them. A graph repeats what was captured: Python code
            in the model does not run again, but parameters may change in place. What
            cannot be captured runs eagerly, with a warning that names the operator.
            Results are copies. One backward pass runs for each forward, and none with
            ``create_graph=True``. Graphs of the last 8 signatures are kept; each holds
            the memory of a step.
        sync_every: Forward passes in training after which `sync_replicated` compares
            the replicas, which may diverge on different hardware; 0 for never.
        signatures: Number of input signatures (shapes, dtypes and modes) for which it is
            cached how operators run; each takes some tenths of a megabyte.

    Returns:
        The model, or the split layer if the model itself is one layer.

    Raises:
        PlanError: On every rank, before anything changes, if the plan does not fit the
            model or the number of ranks.
        HetConvError: Likewise, if ``graphs`` is set for a model on CPUs, or for several
            ranks over gloo.
        DisagreementError: On every rank, if ranks have different plans, models or
            options.

    Examples:
        >>> model = hetconv.parallelize(model, hetconv.Plan.load("plan.json"))
        >>> y = model(x)
    """
    rank_group = rank_group_of(group)

    options = f"fuse {fuse}, graphs {graphs}, sync_every {sync_every}, signatures {signatures}"

    def check() -> tuple[dict[str, nn.Module], Tiles]:
        if graphs:
            _check_graphs(model, rank_group)
        return _checked(model, plan, rank_group.size, signatures)

    found, tiles = validate_together(
        rank_group,
        "parallelize",
        check,
        lambda _: f"plan {plan.digest}, {options}, model {_signature(model)}",
    )
    devices = {p.device for p in model.parameters()}
    for device in devices:
        install_tiles(tiles, device)
    fuse = fuse and fusion_pays(rank_group)
    broadcast(rank_group, [t.data for t in (*model.parameters(), *model.buffers())])
    _share_random_state(rank_group, model)
    model = _swap(model, found, plan, rank_group, fuse)
    use_local_forwards(model)
    captured = cuda_graphs(*devices) if graphs else None
    ModelContext(model, rank_group, sync_every, signatures, captured).attach()
    return model


def _check_graphs(model: nn.Module, group: RankGroup) -> None:
    """Raises `HetConvError` unless the steps of a model can be captured in CUDA graphs."""
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1 or not devices[0].startswith("cuda"):
        raise HetConvError(
            f"graphs=True captures steps on one GPU per rank, but the model is on {devices}; "
            "move it there, or leave graphs out"
        )
    if group.size > 1 and group.backend != "nccl":
        raise HetConvError(
            f"graphs=True captures messages too, which {group.backend} cannot; initialize "
            "the process group with 'nccl', or leave graphs out"
        )


def _checked(
    model: nn.Module, plan: Plan, world: int, signatures: int
) -> tuple[dict[str, nn.Module], Tiles]:
    """Returns the layers and tiles that the plan names, or raises `PlanError`."""
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
    return found, tiles_by_origin(plan.tiles)


def _swap(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    plan: Plan,
    group: RankGroup,
    fuse: bool,
) -> nn.Module:
    """Replaces the layers, and returns the model, which may be one of them itself."""
    split: dict[int, nn.Module] = {}
    for name, layer in found.items():
        if id(layer) not in split:
            split[id(layer)] = _split_layer(layer, plan.layers[name], group, fuse)
            move_hooks(layer, split[id(layer)])
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        parent, _, child = path.rpartition(".")
        if id(layer) in split and path:
            setattr(model.get_submodule(parent), child, split[id(layer)])
    return split.get(id(model), model)


def _check_modules(layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if any(map(nn.parameter.is_lazy, own)):
            raise PlanError(
                f"layer {name!r} is a {type(layer).__name__} whose parameters have no shapes "
                "yet; call the model once "
                f"before hetconv.parallelize"
            )
        if isinstance(layer, nn.SyncBatchNorm):
            raise PlanError(
                f"layer {name!r} is a SyncBatchNorm, which would count the batch once per "
                "rank; leave "
                "convert_sync_batchnorm out: batch norm on shards has the statistics of the "
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
    if isinstance(layer, (PlainConv, nn.Linear)):
        minimal_op(layer).check(split, world)
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
    """Checks that a layer with two names has one split, and that no parameter is shared.

    A parameter of two layers cannot stay in both when one of them is split.
    """
    check_one_split_each(found, splits)
    planned = {id(layer) for layer in found.values()}
    owners: dict[int, nn.Module] = {}
    for name, layer in layers.items():
        for p in layer.parameters(recurse=False):
            other = owners.setdefault(id(p), layer)
            if other is not layer and (id(other) in planned or id(layer) in planned):
                raise PlanError(
                    f"layer {name!r} shares a parameter with another layer; leave both out of "
                    "the plan"
                )


def check_one_split_each(
    layers: Mapping[str, nn.Module], splits: Mapping[str, Split]
) -> None:
    """Raises `PlanError` if a layer with two names has two splits.

    Args:
        layers: Layers by name.
        splits: Split of each name.
    """
    names = {id(layer): name for name, layer in layers.items()}
    for name, layer in layers.items():
        other = names[id(layer)]
        if splits[name] != splits[other]:
            raise PlanError(
                f"the plan splits one layer in two ways, as {name!r} and as {other!r}; give "
                "both the same split"
            )


def _signature(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = ", ".join(
        f"{k}{tuple(v.shape)}{v.dtype}{' channels-last' * is_channels_last(v)}"
        for k, v in tensors
    )
    return f"{type(model).__name__}({shapes})"


def _split_layer(
    layer: nn.Module, planned: LayerPlan, group: RankGroup, fuse: bool
) -> nn.Module:
    if isinstance(layer, PlainConv):
        het_conv = HET_CONVS[len(layer.kernel_size) - 1]
        conv = het_conv._local(layer, planned.split, group, "split")
        conv.fusible, conv.chunks = planned.fusible if fuse else (), planned.chunks
        return conv
    assert isinstance(layer, nn.Linear)
    return HetLinear(layer, planned.split, group)


def _share_random_state(group: RankGroup, model: nn.Module) -> None:
    """Gives all ranks the first one's random state.

    Random functions of replicated values must draw the same numbers on every rank.
    """
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


def tiles_by_origin(tiles: Sequence[TunedTile]) -> Tiles:
    """Groups tiles by where they were tuned; raises `KernelError` for an unknown choice."""
    found: Tiles = {}
    for t in tiles:
        choice: kernels.tiles.Entry = (
            "aten" if t.choice == "aten" else kernels.Tile.parse(t.choice)
        )
        found.setdefault((t.device, t.torch, t.triton), {})[
            t.what, t.spec, t.precision
        ] = choice
    return found


def install_tiles(tiles: Tiles, device: torch.device) -> None:
    """Installs the tiles that were tuned on such a device; warns if there are only others."""
    if not tiles or kernels.backend_choice.unavailable_reason(device) is not None:
        return
    here = (
        kernels.backend_choice.device_name(device),
        *kernels.tiles.versions_in_use(),
    )
    if here in tiles:
        kernels.tiles.install(tiles[here], here[0], here[1:])
    elif here[0] not in _warned_devices:
        _warned_devices.add(here[0])
        there = "; ".join(_origin(*origin) for origin in sorted(tiles))
        warnings.warn(
            f"the plan's tiles were tuned on {there}, and this is {_origin(*here)}: they are "
            "left out. "
            "Run `hetconv autotune` and `hetconv plan` here",
            stacklevel=3,
        )


def _origin(device: str, torch_: str, triton: str) -> str:
    return f"{device} with torch {torch_} and triton {triton}"
