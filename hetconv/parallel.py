"""parallelize: split layers swapped into an ordinary model, and what happens around its forward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import kernels
from .agreement import agree, checksum, prepared
from .calls import is_plain
from .drift import sync_replicated
from .eager import EagerForward, eager
from .errors import PlanError
from .leaves import run_on_own_parts
from .modules import HET_CONVS, HetLinear, PlainConv, least_op, lies_as_wired
from .ops.waiting import folding_pays
from .plan import LayerPlan, Plan
from .replicas import SCOPE, Scope, computed_again
from .rules import Linear, Split
from .running import Running
from .sharing import Parameters, parameters_of
from .tensor import HetTensor, compute_waiting, discard_waiting, gather
from .torch_internals import move_hooks, tree_iter, tree_map
from .transport import Team, answered, broadcast, team_of
from .tuned import TunedTile

Tiles = dict[tuple[str, str, str], dict[kernels.tiles.Problem, kernels.tiles.Entry]]  # by device, torch and triton
_warned: set[str] = set()  # names of devices


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    fuse: bool = False,
    sync_every: int = 100,
) -> nn.Module:
    """Swaps the layers that ``plan`` names for split ones, in place, and returns the model; collective.

    Parameter names stay. Rank 0's parameters and buffers are the truth. Every rank then calls the model with the same
    input, a plain tensor, and gets the same plain output. Kernels take the plan's tiles where they were tuned on a GPU
    of this rank's name, with the versions in use; otherwise a warning says so, once.

    ``fuse``: without autograd (`torch.no_grad`, `torch.inference_mode`), a cut convolution computes the batch norm in
    evaluation, the residual and the activation that alone follow it, as the plan says, while it stores its own slice:
    the same up to rounding, in fewer passes. On CPUs, where that would take longer, it does not.

    ``sync_every``: forwards in training after which `sync_replicated` compares the replicas, and brings them back to
    rank 0's if unequal hardware has rounded them apart; 0 for never.

    Raises `PlanError` on every rank, before anything changes, if the plan does not fit the model or the number of
    ranks, and `DisagreementError` if ranks hold other plans or models.
    """
    team = team_of(group)

    def check() -> tuple[dict[str, nn.Module], Tiles]:
        if plan.world != team.size:
            raise PlanError(f"the plan is for {plan.world} ranks, but this group has {team.size}; make one for them")
        layers = dict(model.named_modules(remove_duplicate=False))
        _check_norms(layers)
        found = {name: _checked_layer(layers, name, split, team.size) for name, split in plan.splits.items()}
        _check_sharing(layers, found, plan.splits)
        return found, _by_origin(plan.tiles)

    found, tiles = prepared(
        team,
        "parallelize",
        check,
        lambda _: f"plan {plan.digest}, fuse {fuse}, sync_every {sync_every}, model {_signature(model)}",
    )
    devices = {p.device for p in model.parameters()}
    for device in devices:
        _install(tiles, device)
    fuse = fuse and folding_pays(team, devices)
    broadcast(team, [t.data for t in (*model.parameters(), *model.buffers())])
    _share_random_state(team, model)
    swapped: dict[int, nn.Module] = {}
    for name, layer in found.items():
        if id(layer) not in swapped:
            swapped[id(layer)] = _swapped(layer, plan.layers[name], team, fuse)
            move_hooks(layer, swapped[id(layer)])
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        parent, _, child = path.rpartition(".")
        if id(layer) in swapped and path:
            setattr(model.get_submodule(parent), child, swapped[id(layer)])
    model = swapped.get(id(model), model)
    run_on_own_parts(model)
    _Root(model, team, sync_every).attach()
    return model


def _check_norms(layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise PlanError(
                f"layer {name!r} is a SyncBatchNorm, which would count the batch once per rank; leave "
                f"convert_sync_batchnorm out: batch norm on parts has the statistics of the whole batch"
            )


def _checked_layer(layers: Mapping[str, nn.Module], name: str, split: Split, world: int) -> nn.Module:
    layer = layers.get(name)
    if isinstance(layer, (PlainConv, nn.Linear)) and not is_plain(layer):
        raise PlanError(
            f"layer {name!r} is a {type(layer).__name__} that computes or keeps its weight in a way of its own; "
            f"leave it out of the plan"
        )
    if isinstance(layer, PlainConv):
        least_op(layer).check(split, world)
    elif isinstance(layer, nn.Linear):
        Linear((1, 1, 1, 1, layer.in_features), layer.out_features).check(split, world)
    else:
        have = f"a {type(layer).__name__}" if layer is not None else "no such module"
        raise PlanError(f"the plan splits {name!r}, but the model has {have} there; make the plan from this model")
    return layer


def _check_sharing(
    layers: Mapping[str, nn.Module], found: Mapping[str, nn.Module], splits: Mapping[str, Split]
) -> None:
    """A layer under two names has one split; a parameter of two layers cannot be in both once one of them is cut."""
    planned = {id(layer): name for name, layer in found.items()}
    for name, layer in found.items():
        first = planned[id(layer)]
        if splits[name] != splits[first]:
            raise PlanError(
                f"the plan splits one layer in two ways, as {name!r} and as {first!r}; give both the same split"
            )
    owners: dict[int, nn.Module] = {}
    for name, layer in layers.items():
        for p in layer.parameters(recurse=False):
            other = owners.setdefault(id(p), layer)
            if other is not layer and (id(other) in planned or id(layer) in planned):
                raise PlanError(f"layer {name!r} shares a parameter with another layer; leave both out of the plan")


def _signature(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = ", ".join(f"{k}{tuple(v.shape)}{v.dtype}{' channels-last' * lies_as_wired(v)}" for k, v in tensors)
    return f"{type(model).__name__}({shapes})"


def _swapped(layer: nn.Module, planned: LayerPlan, team: Team, fuse: bool) -> nn.Module:
    if isinstance(layer, PlainConv):
        made = HET_CONVS[len(layer.kernel_size) - 1]._local(layer, planned.split, team, "split")
        made.followers, made.chunks = planned.followers if fuse else (), planned.chunks
        return made
    assert isinstance(layer, nn.Linear)
    return HetLinear(layer, planned.split, team)


def _share_random_state(team: Team, model: nn.Module) -> None:
    """Random operators on replicated values must draw alike: every rank goes on from rank 0's generators."""
    state = torch.get_rng_state()
    answered(team, partial(dist.broadcast, state, group=team.control, group_src=0))
    torch.set_rng_state(state)
    for device in {p.device for p in model.parameters() if p.device.type == "cuda"}:
        state = torch.cuda.get_rng_state(device)
        answered(team, partial(dist.broadcast, state, group=team.control, group_src=0))
        torch.cuda.set_rng_state(state, device)


def _by_origin(tiles: Sequence[TunedTile]) -> Tiles:
    """Raises `KernelError` for a choice that is neither a tile nor ATen."""
    found: Tiles = {}
    for t in tiles:
        choice: kernels.tiles.Entry = "aten" if t.choice == "aten" else kernels.Tile.parse(t.choice)
        found.setdefault((t.device, t.torch, t.triton), {})[t.what, t.spec, t.precision] = choice
    return found


def _install(tiles: Tiles, device: torch.device) -> None:
    """Hands a device the tiles that were tuned on its like; warns if there are others, but none of these."""
    if not tiles or kernels.passes.obstacle(device) is not None:
        return
    here = (kernels.passes.device_name(device), *kernels.tiles.versions_in_use())
    if here in tiles:
        kernels.tiles.install(tiles[here], here[0], here[1:])
    elif here[0] not in _warned:
        _warned.add(here[0])
        there = "; ".join(_origin(*origin) for origin in sorted(tiles))
        warnings.warn(
            f"the plan's tiles were tuned on {there}, and this is {_origin(*here)}: they are left out. "
            "Run `hetconv autotune` and `hetconv plan` here",
            stacklevel=3,
        )


def _origin(device: str, torch_: str, triton: str) -> str:
    return f"{device} with torch {torch_} and triton {triton}"


class _Root:
    """What happens around the forward of a parallelized model: agreement before it, the gathered output after it."""

    def __init__(self, model: nn.Module, team: Team, sync_every: int):
        self.model, self.team, self.sync_every = model, team, sync_every
        self._trained, self._running = 0, Running(team)
        self._seen: set[str] = set()
        self._tokens: list[Any] = []

    def attach(self) -> None:
        self.model.forward = EagerForward(self.model)
        self.model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        self.model.register_forward_hook(self._after, always_call=True)

    @eager
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        said = ", ".join(f"{tuple(x.shape)} {x.dtype}{' requiring gradients' * x.requires_grad}" for x in tensors)
        said = f"inputs {said or 'none'}; training {module.training}; gradients {torch.is_grad_enabled()}"
        said += f"; autocast {_autocast(module)}"
        if self._running.untold:  # of a forward that raised an error
            said += f"; running statistics of {self._running.untold} norms, not told yet"
        values = ""
        if said not in self._seen:  # once per signature: the same batch on every rank is easy to get wrong
            values = f"; checksums of input values {[checksum(x) for x in tensors if not isinstance(x, HetTensor)]}"
        agree(self.team, "forward", said + values)
        self._seen.add(said)
        self._running.tell()
        if module.training and torch.is_grad_enabled() and self.sync_every and not computed_again():
            self._trained += 1
            if self._trained % self.sync_every == 0:
                sync_replicated(module)
        scope = _scope(module, self.team, any(map(_is_channels_last, tensors)), self._running)
        self._tokens.append(SCOPE.set(scope))

    @eager
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        try:
            if output is None and sys.exc_info()[0] is not None:  # the forward raised
                return None
            whole = tree_map(partial(gather, images=True), output)
            compute_waiting()  # what is left would read parameters and inputs as they are later
            self._running.tell()
            return whole
        finally:
            discard_waiting()
            if self._tokens:
                SCOPE.reset(self._tokens.pop())


def _autocast(model: nn.Module) -> torch.dtype | None:
    kind = next((p.device.type for p in model.parameters()), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_channels_last(x: Any) -> bool:
    """Whether it is a batch of images that lie so and no other way."""
    last = kernels.CHANNELS_LAST.get(x.dim()) if isinstance(x, Tensor) else None
    return last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)


def _scope(model: nn.Module, team: Team, channels_last: bool, running: Running) -> Scope:
    """Of the parameters of which several ranks hold the same elements; without autograd it needs none."""
    found = parameters_of(model) if torch.is_grad_enabled() and team.size > 1 else Parameters([], {}, set())
    shared = [p for p in found.every if id(p) not in found.held or found.held[id(p)].repeated]
    return Scope(team, shared, found.held, found.as_wired, channels_last=channels_last, running=running)
