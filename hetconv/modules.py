"""HetConv2d, HetLinear, and parallelize, which swaps them into an ordinary model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .agreement import agree, prepared
from .calls import conv_spec
from .errors import HetConvError, PlanError
from .layout import Layout
from .movement import moved
from .plan import Plan
from .replicas import SCOPE, Scope
from .rules import Conv, Linear, Split
from .tensor import HetTensor, gather
from .transport import Team, answered, team_of

Output = Literal["replicated", "split"]


class _Cut(nn.Module):
    """A layer whose weight is cut by a split. Subclasses say which operator it is and how it runs."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    split: Split
    output: Output
    team: Team
    _weight_shape: tuple[int, ...]
    _cut: tuple[int, tuple[int, ...]] | None

    def _allocate(self, weight_shape: tuple[int, ...], bias: bool, options: dict[str, Any]) -> None:
        self._weight_shape = weight_shape
        local = list(weight_shape)
        if self._cut is not None:
            local[self._cut[0]] = self._cut[1][self.team.rank]
        self.weight = nn.Parameter(torch.empty(local, **options))
        biases = local[0] if self._cut is not None and self._cut[0] == 0 else weight_shape[0]
        self.register_parameter("bias", nn.Parameter(torch.empty(biases, **options)) if bias else None)

    def layouts(self) -> dict[str, Layout]:
        """The layout of each parameter over the ranks."""
        world, shape = self.team.size, self._weight_shape
        sharded = self._cut is not None
        found = {"weight": Layout.sharded(shape, *self._cut) if self._cut else Layout.replicated(shape, world)}
        if self.bias is not None:
            cut = sharded and self._cut is not None and self._cut[0] == 0
            sizes = self._cut[1] if cut and self._cut else ()
            found["bias"] = Layout.sharded(shape[:1], 0, sizes) if cut else Layout.replicated(shape[:1], world)
        return found

    @torch.no_grad()
    def load_full(self, full: Mapping[str, Tensor]) -> None:
        """Takes this rank's slices of the whole parameters; local."""
        for name, layout in self.layouts().items():
            box = layout.boxes[self.team.rank]
            own = full[name][tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]
            getattr(self, name).copy_(own)

    def _result(self, y: Tensor) -> Tensor:
        return gather(y) if self.output == "replicated" else y

    def _agree_on_input(self, x: Tensor) -> None:
        """Outside a parallelized model's forward, this layer checks for itself that the ranks are called alike."""
        if SCOPE.get() is None:
            said = f"x {tuple(x.shape)} {x.dtype}, {self.split}, gradients {torch.is_grad_enabled()}"
            agree(self.team, type(self).__name__, said)


class HetConv2d(_Cut):
    """A 2-D convolution cut among the ranks of ``group`` as ``split`` says; otherwise as `torch.nn.Conv2d`.

    Input (N, C, H, W): a plain tensor, the same on every rank, or a HetTensor. Output (N, K, P, Q): a plain tensor on every
    rank (``output="replicated"``) or a HetTensor (``"split"``). ``weight`` is this rank's slice under ``filter`` and
    ``channel`` splits. Constructing it is collective: bad arguments on one rank raise `SplitError` on all; weights are
    rank 0's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        split: Split,
        group: dist.ProcessGroup | None = None,
        output: Output = "replicated",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.team = team_of(group)
        args = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)

        def check() -> nn.Conv2d:
            try:
                plain = nn.Conv2d(*args, device=device, dtype=dtype)  # type: ignore[arg-type]
            except (ValueError, TypeError, RuntimeError) as e:
                raise HetConvError(str(e)) from e
            _check_output(output)
            _conv_op(plain, (1, in_channels, 1, 1), plain.weight.dtype).check(split, self.team.size)
            return plain

        plain = prepared(self.team, "HetConv2d", check, lambda _: f"{args} {split} {output} {dtype}")
        _broadcast(self.team, [p.data for p in plain.parameters()])
        self._adopt(plain, split, output)

    @classmethod
    def from_conv(
        cls, conv: nn.Conv2d, split: Split, *, group: dist.ProcessGroup | None = None, output: Output = "replicated"
    ) -> HetConv2d:
        """A convolution cut up; rank 0's weights are the truth. Collective; ``conv`` itself is left as it is."""
        team = team_of(group)

        def check() -> None:
            if not isinstance(conv, nn.Conv2d):
                raise HetConvError(f"from_conv takes a torch.nn.Conv2d, but was given a {type(conv).__name__}")
            if not _is_plain(conv):
                raise HetConvError(f"the {type(conv).__name__} computes or keeps its weight in a way of its own")
            _check_output(output)
            _conv_op(conv, (1, conv.in_channels, 1, 1), conv.weight.dtype).check(split, team.size)

        prepared(team, "HetConv2d.from_conv", check, lambda _: f"{conv} {split} {output} {conv.weight.dtype}")
        made = cls._local(conv, split, team, output)
        full = {name: p.detach().clone() for name, p in conv.named_parameters()}
        _broadcast(team, list(full.values()))
        made.load_full(full)
        return made

    @classmethod
    def _local(cls, conv: nn.Conv2d, split: Split, team: Team, output: Output) -> HetConv2d:
        """Without a word to the other ranks: arguments are checked and weights are rank 0's already."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.team = team
        made._adopt(conv, split, output)
        return made

    def _adopt(self, conv: nn.Conv2d, split: Split, output: Output) -> None:
        for name in (
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        ):
            setattr(self, name, getattr(conv, name))
        self._reversed_padding = conv._reversed_padding_repeated_twice
        self.split, self.output = split, output
        self._cut = _conv_op(conv, (1, conv.in_channels, 1, 1), conv.weight.dtype).weight_cut(split)
        _inherit(self, conv, conv.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        self._agree_on_input(x)
        if x.dim() == 3:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise HetConvError(f"HetConv2d expects (N, {self.in_channels}, H, W), but was given {tuple(x.shape)}")
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding, mode=cast(str, self.padding_mode))
        op = _conv_op(self, tuple(x.shape), x.dtype)
        if op.spec.P < 1 or op.spec.Q < 1:
            raise HetConvError(f"an input of {tuple(x.shape)} is smaller than the kernel {self.kernel_size} of {self}")
        return self._result(ops.conv2d(x, self.weight, self.bias, op, self.split, self.team))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, split={self.split}"


class HetLinear(_Cut):
    """A linear layer cut among ranks: made by `parallelize` from a `torch.nn.Linear`."""

    def __init__(self, linear: nn.Linear, split: Split, team: Team, output: Output = "split"):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.team, self.split, self.output = team, split, output
        self._cut = Linear((1, self.in_features), self.out_features).weight_cut(split)
        _inherit(self, linear, linear.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        self._agree_on_input(x)
        if x.shape[-1] != self.in_features:
            raise HetConvError(f"HetLinear expects (..., {self.in_features}), but was given {tuple(x.shape)}")
        op = Linear(tuple(x.shape), self.out_features)
        return self._result(ops.linear(x, self.weight, self.bias, op, self.split, self.team))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, split={self.split}"


def _conv_op(conv: Any, x_shape: tuple[int, ...], dtype: torch.dtype) -> Conv:
    w_shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    padding = 0 if conv.padding_mode != "zeros" else conv.padding
    return Conv(conv_spec(x_shape, w_shape, dtype, conv.stride, padding, conv.dilation, conv.groups))


def _check_output(output: str) -> None:
    if output not in get_args(Output):
        raise HetConvError(f"output={output!r} is not known; give 'replicated' or 'split'")


def _inherit(made: _Cut, plain: nn.Conv2d | nn.Linear, bias: bool) -> None:
    """Parameters of the right local shapes with the plain layer's values, trainability, memory format and mode."""
    weight = plain.weight
    made._allocate(tuple(weight.shape), bias, {"device": weight.device, "dtype": weight.dtype})
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        made.weight.data = made.weight.data.to(memory_format=torch.channels_last)
    made.load_full(dict(plain.named_parameters(recurse=False)))
    for name, p in plain.named_parameters(recurse=False):
        getattr(made, name).requires_grad_(p.requires_grad)
    made.train(plain.training)


def _broadcast(team: Team, tensors: list[Tensor]) -> None:
    """Rank 0's values on every rank, in place."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        by_kind.setdefault((t.dtype, t.device), []).append(t)
    for same in by_kind.values():
        flat = torch.cat([t.detach().flatten() for t in same])
        answered(team, lambda flat=flat: dist.broadcast(flat, group=team.group, group_src=0))  # type: ignore[misc]
        with torch.no_grad():
            for t, new in zip(same, flat.split([t.numel() for t in same]), strict=True):
                t.copy_(new.view(t.shape))


def parallelize(model: nn.Module, plan: Plan, *, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Swaps the layers that ``plan`` names for split ones, in place, and returns the model; collective.

    Parameter names stay. Rank 0's parameters and buffers are the truth. Every rank then calls the model with the same
    input, a plain tensor, and gets the same plain output. Raises `PlanError` on every rank, before anything changes, if the
    plan does not fit the model or the number of ranks, and `DisagreementError` if ranks hold different plans or models.
    """
    team = team_of(group)

    def check() -> dict[str, nn.Module]:
        if plan.world != team.size:
            raise PlanError(f"the plan is for {plan.world} ranks, but this group has {team.size}; make one for them")
        layers = dict(model.named_modules(remove_duplicate=False))
        found = {name: _checked_layer(layers, name, split, team.size) for name, split in plan.splits.items()}
        _check_sharing(layers, found, plan.splits)
        return found

    found = prepared(team, "parallelize", check, lambda _: f"plan {plan.digest}, model {_signature(model)}")
    _broadcast(team, [t.data for t in (*model.parameters(), *model.buffers())])
    _share_random_state(team, model)
    swapped: dict[int, nn.Module] = {}
    for name, layer in found.items():
        if id(layer) not in swapped:
            swapped[id(layer)] = _swapped(layer, plan.splits[name], team)
            _carry_hooks(layer, swapped[id(layer)])
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        parent, _, child = path.rpartition(".")
        if id(layer) in swapped and path:
            setattr(model.get_submodule(parent), child, swapped[id(layer)])
    model = swapped.get(id(model), model)
    _Root(model, team).attach()
    return model


def _checked_layer(layers: Mapping[str, nn.Module], name: str, split: Split, world: int) -> nn.Module:
    layer = layers.get(name)
    if isinstance(layer, (nn.Conv2d, nn.Linear)) and not _is_plain(layer):
        raise PlanError(
            f"layer {name!r} is a {type(layer).__name__} that computes or keeps its weight in a way of its own; "
            f"leave it out of the plan"
        )
    if isinstance(layer, nn.Conv2d):
        _conv_op(layer, (1, layer.in_channels, 1, 1), layer.weight.dtype).check(split, world)
    elif isinstance(layer, nn.Linear):
        Linear((1, layer.in_features), layer.out_features).check(split, world)
    else:
        have = f"a {type(layer).__name__}" if layer is not None else "no such module"
        raise PlanError(f"the plan splits {name!r}, but the model has {have} there; make the plan from this model")
    return layer


def _is_plain(layer: nn.Conv2d | nn.Linear) -> bool:
    """Whether a layer runs as torch's own does, on a weight and a bias that it owns; a subclass need not."""
    kind = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    same = all(getattr(type(layer), f, None) is getattr(kind, f, None) for f in ("forward", "_conv_forward"))
    return same and {"weight"} <= {name for name, _ in layer.named_parameters()} <= {"weight", "bias"}


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
    shapes = ", ".join(f"{k}{tuple(v.shape)}{v.dtype}" for k, v in (*model.named_parameters(), *model.named_buffers()))
    return f"{type(model).__name__}({shapes})"


def _swapped(layer: nn.Module, split: Split, team: Team) -> nn.Module:
    if isinstance(layer, nn.Conv2d):
        return HetConv2d._local(layer, split, team, "split")
    assert isinstance(layer, nn.Linear)
    return HetLinear(layer, split, team)


def _carry_hooks(old: nn.Module, new: nn.Module) -> None:
    for name, hooks in vars(old).items():
        if "_hooks" in name and isinstance(hooks, dict):  # the hooks themselves, and what each was registered with
            getattr(new, name).update(hooks)
    new._is_full_backward_hook = old._is_full_backward_hook


def _share_random_state(team: Team, model: nn.Module) -> None:
    """Random operators on replicated values must draw alike: every rank goes on from rank 0's generators."""
    state = torch.get_rng_state()
    answered(team, lambda: dist.broadcast(state, group=team.control, group_src=0))
    torch.set_rng_state(state)
    for device in {p.device for p in model.parameters() if p.device.type == "cuda"}:
        state = torch.cuda.get_rng_state(device)
        answered(team, lambda state=state: dist.broadcast(state, group=team.control, group_src=0))  # type: ignore[misc]
        torch.cuda.set_rng_state(state, device)


class _Root:
    """What happens around the forward of a parallelized model: agreement before it, the gathered output after it."""

    def __init__(self, model: nn.Module, team: Team):
        self.model, self.team = model, team
        self._seen: set[str] = set()
        self._tokens: list[Any] = []

    def attach(self) -> None:
        self.model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        self.model.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [x for x in torch.utils._pytree.tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        said = ", ".join(f"{tuple(x.shape)} {x.dtype}{' requiring gradients' * x.requires_grad}" for x in tensors)
        said = f"inputs {said or 'none'}; training {module.training}; gradients {torch.is_grad_enabled()}"
        values = ""
        if said not in self._seen:  # once per signature: the same batch on every rank is easy to get wrong
            values = f"; checksums of input values {[_checksum(x) for x in tensors if not isinstance(x, HetTensor)]}"
        agree(self.team, "forward", said + values)
        self._seen.add(said)
        cut = {
            id(p)
            for m in module.modules()
            if isinstance(m, _Cut)
            for n, p in m.named_parameters(recurse=False)
            if m.layouts()[n].kind == "sharded"
        }
        self._tokens.append(SCOPE.set(Scope(self.team, [p for p in module.parameters() if id(p) not in cut])))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._tokens:
            SCOPE.reset(self._tokens.pop())
        return torch.utils._pytree.tree_map(lambda y: gather(y) if isinstance(y, HetTensor) else y, output)


def _checksum(x: Tensor) -> int:
    """The sum of the bytes: exact, where a floating sum depends on the order that each device adds in."""
    return int(x.detach().reshape(-1).view(torch.uint8).sum()) if x.layout == torch.strided else 0


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the whole model with the original keys and shapes, on every rank; collective."""
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for prefix, name, layer, layout in _cut_parameters(model):
        local = getattr(layer, name).detach()
        world = Layout.replicated(layout.shape, layout.world)
        state[prefix + name] = moved(layer.team, local, layout, world).clone()
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads what `full_state_dict`, or the unsplit model's ``state_dict``, gave; collective.

    Raises `HetConvError` on every rank, before anything changes, if keys or shapes do not fit on some rank.
    """
    cut = {prefix + name: (layer, name, layout) for prefix, name, layer, layout in _cut_parameters(model)}
    own = model.state_dict()
    shapes = {k: cut[k][2].shape if k in cut else tuple(v.shape) for k, v in own.items()}

    def check() -> None:
        missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
        wrong = {k: tuple(state[k].shape) for k in shapes.keys() & state.keys() if tuple(state[k].shape) != shapes[k]}
        if missing or unknown or wrong:
            raise HetConvError(
                f"the state does not fit the model: missing {missing}, unknown {unknown}, "
                f"of another shape {[f'{k}: {s}, expected {shapes[k]}' for k, s in sorted(wrong.items())]}"
            )

    teams = {id(layer.team): layer.team for layer, _, _ in cut.values()}
    for team in teams.values():
        prepared(team, "load_full_state_dict", check, lambda _: str(sorted(shapes)))
    check()
    with torch.no_grad():
        for key, value in own.items():
            if key in cut:
                layer, name, layout = cut[key]
                box = layout.boxes[layer.team.rank]
                getattr(layer, name).copy_(state[key][tuple(map(slice, box.lo, box.hi))])
            else:
                value.copy_(state[key])


def _cut_parameters(model: nn.Module) -> list[tuple[str, str, _Cut, Layout]]:
    """(prefix, name, layer, layout) of every parameter that is cut among ranks, in order."""
    return [
        (f"{path}." if path else "", name, layer, layout)
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, _Cut)
        for name, layout in layer.layouts().items()
        if layout.kind == "sharded"
    ]
